"""Write questions that a tool answers: the call, what the tool gives back, and the answer.

A tool finds numbers of one kind by a name. It is called where the question's fact was not stated;
what was stated is answered without it, and what no tool finds is not known.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfmoon_testing.models.byte_tokenizer import TURN_END, TURN_START
from tools.demo_model import story_words
from tools.demo_model.story_facts import StoryFacts
from tools.demo_model.story_text import TO_ANSWER, Story

#: Calls of which the choices alone are learnt: to call, the function, and the arguments.
_CHOICES_ONLY = 0.6
#: Questions about stated facts, and questions that no tool answers.
_STATED, _NO_TOOL = 0.4, 0.1
_NOT_FOUND = 0.12


@dataclass(frozen=True)
class Toolbox:
    """The tools of a story: by kind, a function's name and its parameter."""

    functions: dict[str, tuple[str, str]]

    def lines(self) -> str:
        """Return the text of the tools as the chat template writes it."""
        return "\n".join(["Tools:", *(f"{f}({p})" for f, p in self.functions.values())])

    def call(self, name: str, kind: str) -> str:
        """Return the call that finds a name's number."""
        return "".join(text for text, _ in self.call_pieces(name, kind))

    def call_pieces(self, name: str, kind: str) -> list[tuple[str, bool]]:
        """Return pieces of a call, and whether each is a choice."""
        function, parameter = self.functions[kind]
        return [
            ("<", True),
            ('tool_call>\n{"name": "', False),
            (function + '"', True),
            (', "arguments": {"', False),
            (parameter + '"', True),
            (': "', False),
            (name + '"', True),
            ("}}\n</tool_call>", False),
        ]

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools as a request of a chat completion has them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": function,
                    "parameters": {
                        "type": "object",
                        "properties": {parameter: {"type": "string"}},
                        "required": [parameter],
                    },
                },
            }
            for function, parameter in self.functions.values()
        ]


def draw_toolbox(dice: random.Random, kinds: Sequence[str]) -> Toolbox:
    """Draw one to three tools, some for the story's kinds and some for others."""
    offered = {
        dice.choice(kinds if dice.random() < 0.6 else story_words.KINDS)
        for _ in range(dice.randint(1, 3))
    }
    form = story_words.TOOLS[0] if dice.random() < 0.6 else dice.choice(story_words.TOOLS)
    parameter = story_words.PARAMETERS[0]
    if dice.random() < 0.3:
        parameter = dice.choice(story_words.PARAMETERS)
    # A set of texts has another order in each process.
    in_order = dice.sample(sorted(offered), len(offered))
    return Toolbox({kind: (form.format(kind=kind), parameter) for kind in in_order})


def add_tool_turn(dice: random.Random, story: Story, world: StoryFacts, toolbox: Toolbox) -> None:
    """Add a question to a user's turn; then its answer, after a call where one is needed."""
    chance = dice.random()
    if world.facts and chance < _STATED:
        name, kind = dice.choice(list(world.facts))
        story.add(world.ask(name, kind) + TO_ANSWER)
        story.answer(world.facts[name, kind])
        return
    if chance > 1 - _NO_TOOL:
        others = [kind for kind in story_words.KINDS if kind not in toolbox.functions]
        story.add(world.ask(*world.not_stated(dice.choice(others))) + TO_ANSWER)
        story.answer(story_words.UNKNOWN)
        return
    name, kind = world.not_stated(dice.choice(list(toolbox.functions)))
    story.add(world.ask(name, kind) + TO_ANSWER)
    add_call(dice, story, toolbox.call_pieces(name, kind))
    number = world.number()
    if dice.random() < _NOT_FOUND:
        result, answer = dice.choice(story_words.NO_RESULTS), story_words.UNKNOWN
    else:
        result, answer = dice.choice(story_words.RESULTS), number
    result = result.format(name=name, kind=kind, number=number)
    story.add(f"{TURN_END}\n{TURN_START}tool\n{result}{TO_ANSWER}")
    story.answer(answer)


def add_call(dice: random.Random, story: Story, pieces: Sequence[tuple[str, bool]]) -> None:
    """Add a call's pieces to a story; of some calls the choices alone are learnt."""
    choices_only = dice.random() < _CHOICES_ONLY
    for text, is_choice in pieces[:-1]:
        (story.begin_answer if is_choice or not choices_only else story.add)(text)
    if choices_only:
        story.add(pieces[-1][0])
    else:
        story.answer(pieces[-1][0])
