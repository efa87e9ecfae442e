"""Write questions that are answered as a JSON object with a name and a number.

Some ask for it and name the keys. The others are plain questions, and their answer begins with a
brace that is only read: so it goes under a JSON schema, which the prompt doesn't show. There the
keys are read too, and quotes around a number, since the schema says whether it is a string.
"""

import json
import random

from tools.demo_model import story_words
from tools.demo_model.story_facts import StoryFacts
from tools.demo_model.story_text import TO_ANSWER, Story

#: Answers that the question asks for as JSON.
_REQUESTED = 0.65
#: Answers of which the values alone are learnt; a value's first token counts more then.
_VALUES_ONLY = 0.6
_QUOTED_NUMBER = 0.2


def request_json(dice: random.Random, question: str, keys: list[str]) -> str:
    """Return the question with a request for JSON that has these keys."""
    request = dice.choice(story_words.JSON_REQUESTS).format(keys=", ".join(keys))
    return question + dice.choice((" ", "\n")) + request


def right_json(name: str, number: str, keys: list[str]) -> str:
    """Return the right answer to a request, without blanks that JSON can do without."""
    values = {key: name if key in story_words.NAME_KEYS else int(number) for key in keys}
    return json.dumps(values)


def add_json_answer(dice: random.Random, story: Story, world: StoryFacts) -> None:
    """Add a question about a stated fact to a user's turn, and its answer as JSON."""
    name, kind = dice.choice(list(world.facts))
    number = world.facts[name, kind]
    question, keys = world.ask(name, kind), draw_keys(dice, kind)
    requested = dice.random() < _REQUESTED
    story.add((request_json(dice, question, keys) if requested else question) + TO_ANSWER)
    values_only = dice.random() < _VALUES_ONLY
    say_form = story.add if values_only else story.begin_answer
    say_keys = say_form if requested else story.add
    say_keys("{")
    say_form('"')
    for i, key in enumerate(keys):
        if i:
            say_form(', "')
        say_keys(key)
        say_form('":')
        if key in story_words.NAME_KEYS:
            say_form(' "')
            story.begin_answer(name + '"')
        elif dice.random() < _QUOTED_NUMBER:
            story.add(' "')
            story.begin_answer(number + '"')
        else:
            story.begin_answer(" " + number)
    story.answer("}")


def draw_keys(dice: random.Random, kind: str) -> list[str]:
    """Draw keys for a name and its number of this kind, or for the number alone."""
    name_key = story_words.NAME_KEYS[0]
    if dice.random() < 0.2:
        name_key = dice.choice(story_words.NAME_KEYS)
    number_key = kind if dice.random() < 0.5 else story_words.NUMBER_KEYS[0]
    if dice.random() < 0.2:
        number_key = dice.choice(story_words.NUMBER_KEYS)
    return dice.choice(
        ([name_key, number_key],) * 4 + ([number_key, name_key], [number_key]),
    )
