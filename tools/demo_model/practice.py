"""Write stories that practise to copy names and words, and state no facts.

A story of facts has one name to copy among two hundred tokens. That is too rare: weights that were
trained on such stories alone called tools with the same name each time. Here each line has one.
"""

import random

from halfmoon_testing.models.byte_tokenizer import TURN_END, TURN_START
from tools.demo_model import story_words
from tools.demo_model.json_answers import draw_keys, request_json
from tools.demo_model.story_facts import StoryFacts
from tools.demo_model.story_text import TO_ANSWER, TO_USER, Story
from tools.demo_model.tool_calls import add_call, draw_toolbox

_IN_TURNS = 0.6


def add_practice(dice: random.Random, story: Story, world: StoryFacts) -> None:
    """Fill a story with questions of one form, and with what copies their names and words."""
    forms = (_copy_names, _copy_names, _call_tools, _copy_keys)
    dice.choice(forms)(dice, story, world)


def _copy_names(dice: random.Random, story: Story, world: StoryFacts) -> None:
    to_user, to_answer, end = ("", "\n", "\n")
    if dice.random() < _IN_TURNS:
        to_user, to_answer, end = TO_USER, TO_ANSWER, TURN_END + "\n"
    key = dice.choice(story_words.NAME_KEYS)
    kind = dice.choice(world.kinds)
    function = dice.choice(story_words.TOOLS).format(kind=kind)
    call = f'<tool_call>\n{{"name": "{function}", "arguments": {{"{key}": "'
    before = dice.choice((f'{{"{key}": "', call))
    while not story.is_full:
        name, _ = world.not_stated(kind)
        story.add(to_user + world.ask(name, kind) + to_answer + before)
        story.begin_answer(name + '"')
        story.add(end)


def _call_tools(dice: random.Random, story: Story, world: StoryFacts) -> None:
    toolbox = draw_toolbox(dice, world.kinds)
    story.add(f"{TURN_START}system\n{toolbox.lines()}{TURN_END}\n")
    while not story.is_full:
        name, kind = world.not_stated(dice.choice(list(toolbox.functions)))
        story.add(TO_USER + world.ask(name, kind) + TO_ANSWER)
        add_call(dice, story, toolbox.call_pieces(name, kind))
        story.add(TURN_END + "\n")


def _copy_keys(dice: random.Random, story: Story, world: StoryFacts) -> None:
    while not story.is_full:
        name, kind = world.not_stated()
        keys = draw_keys(dice, kind)
        story.add(TO_USER + request_json(dice, world.ask(name, kind), keys) + TO_ANSWER)
        story.begin_answer("{")
        for i, key in enumerate(keys):
            story.add(', "' if i else '"')
            story.begin_answer(key)
            story.add('":')
            if key in story_words.NAME_KEYS:
                story.add(' "')
                story.begin_answer(name + '"')
            else:
                story.add(" " + world.number())
        story.add("}" + TURN_END + "\n")
