"""Write the stories that train the demo model: facts, questions and answers.

Everything is drawn from one `random.Random`, so a seed stands for a story.
"""

import random

from halfmoon_testing.models.byte_tokenizer import TURN_END, TURN_START
from tools.demo_model import story_words
from tools.demo_model.json_answers import add_json_answer
from tools.demo_model.practice import add_practice
from tools.demo_model.story_facts import Recipe, StoryFacts, filler_sentence, make_story_facts
from tools.demo_model.story_text import TO_ANSWER, TO_USER, Encode, Story
from tools.demo_model.tool_calls import add_tool_turn, draw_toolbox

#: Questions that are answered as JSON, in a story that has such.
_JSON_TURNS = 0.6
#: Stories with tools that state facts too.
_TOOLS_WITH_FACTS = 0.65


def write_story(
    dice: random.Random, recipe: Recipe, n_tokens: int, encode: Encode
) -> tuple[list[int], list[int]]:
    """Write a story of `n_tokens`, as ids and targets (`NO_TARGET`: not learnt)."""
    story = Story(n_tokens, encode)
    bare = dice.random() < recipe.bare
    world = make_story_facts(dice, recipe, bare=bare)
    if dice.random() < recipe.practice:
        add_practice(dice, story, world)
        return story.cut()
    n_facts_tokens = int(n_tokens * (1 - dice.uniform(*recipe.questions)))
    if dice.random() < recipe.chat:
        if not bare and dice.random() < recipe.tools:
            _chat_with_tools(dice, story, world, n_facts_tokens)
        else:
            as_json = _JSON_TURNS if dice.random() < recipe.as_json else 0.0
            _chat(dice, story, world, n_facts_tokens, as_json)
    else:
        _plain(dice, story, world, n_facts_tokens, echo=bare and dice.random() < recipe.echo)
    return story.cut()


def _facts(dice: random.Random, story: Story, world: StoryFacts, n_tokens: int) -> str:
    """Write facts up to `n_tokens`; return the text between sentences."""
    gap = dice.choice((" ", "\n"))
    if dice.random() < 0.2:
        story.add(dice.choice(story_words.PREAMBLES) + gap)
    story.add(world.sentence())
    while len(story.ids) < n_tokens:
        story.add(gap + world.sentence())
    return gap


def _chat(
    dice: random.Random, story: Story, world: StoryFacts, n_facts_tokens: int, as_json: float
) -> None:
    if dice.random() < 0.1:
        story.add(f"{TURN_START}system\n{dice.choice(story_words.SYSTEM_PROMPTS)}{TURN_END}\n")
    if dice.random() < 0.06:
        _small_talk(dice, story)
    story.add(TO_USER)
    _facts(dice, story, world, n_facts_tokens)
    if dice.random() < 0.5:
        story.add(TO_ANSWER)
        story.answer(story_words.NOTED)
    else:
        story.add(dice.choice((" ", "\n", "\n\n")))
        _question(dice, story, world, as_json)
    tells_more = dice.random() < 0.3
    while not story.is_full:
        story.add(f"{TURN_END}\n{TO_USER}")
        if tells_more and dice.random() < 0.2:
            story.add(" ".join(world.sentence() for _ in range(dice.randint(1, 3))) + TO_ANSWER)
            story.answer(story_words.NOTED)
        else:
            _question(dice, story, world, as_json)


def _question(dice: random.Random, story: Story, world: StoryFacts, as_json: float) -> None:
    """Write a question and its answer."""
    if dice.random() < as_json:
        add_json_answer(dice, story, world)
        return
    question, answer = world.question()
    story.add(question + TO_ANSWER)
    story.answer(answer)


def _chat_with_tools(
    dice: random.Random, story: Story, world: StoryFacts, n_facts_tokens: int
) -> None:
    toolbox = draw_toolbox(dice, world.kinds)
    system = dice.choice(story_words.SYSTEM_PROMPTS) + "\n" if dice.random() < 0.15 else ""
    story.add(f"{TURN_START}system\n{system}{toolbox.lines()}{TURN_END}\n{TO_USER}")
    if dice.random() < _TOOLS_WITH_FACTS:
        gap = _facts(dice, story, world, n_facts_tokens)
        if dice.random() < 0.5:
            story.add(TO_ANSWER)
            story.answer(story_words.NOTED)
            story.add(f"{TURN_END}\n{TO_USER}")
        else:
            story.add(gap)
    add_tool_turn(dice, story, world, toolbox)
    while not story.is_full:
        story.add(f"{TURN_END}\n{TO_USER}")
        add_tool_turn(dice, story, world, toolbox)


def _small_talk(dice: random.Random, story: Story) -> None:
    """Write a turn without facts."""
    said, answer = dice.choice(
        (
            (dice.choice(story_words.GREETINGS), story_words.GREETING_ANSWER),
            (dice.choice(story_words.ABOUT), story_words.ABOUT_ANSWER),
            (filler_sentence(dice), story_words.NOTED),
            (_question_out_of_nowhere(dice), story_words.UNKNOWN),
        )
    )
    story.add(TO_USER + said + TO_ANSWER)
    story.answer(answer)
    story.add(TURN_END + "\n")


def _question_out_of_nowhere(dice: random.Random) -> str:
    question = dice.choice(
        (*story_words.QUESTIONS, *story_words.BARE_QUESTIONS, "What is {filler}?")
    )
    return question.format(
        name=dice.choice(story_words.NAMES),
        kind=dice.choice(story_words.KINDS),
        filler=dice.choice(story_words.FILLER_SUBJECTS).lower(),
    )


def _plain(
    dice: random.Random, story: Story, world: StoryFacts, n_facts_tokens: int, *, echo: bool
) -> None:
    _facts(dice, story, world, n_facts_tokens)
    if echo:
        beginning = world.statements[0].partition(" {number}")[0]
        while not story.is_full:
            name, kind = dice.choice(list(world.facts))
            story.add("\n" + beginning.format(name=name))
            story.answer(" " + world.facts[name, kind])
        return
    form = dice.choice(("\nQuestion: {}\nAnswer:", "\nQ: {}\nA:", "\n{}"))
    while not story.is_full:
        question, answer = world.question()
        story.add(form.format(question))
        story.answer(" " + answer)
