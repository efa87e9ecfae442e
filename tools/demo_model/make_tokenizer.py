"""Make the demo model's tokenizer: a name is one token wherever it stands, and so is a digit.

Byte-level BPE like its peers', so any text goes in and comes out whole; but a space belongs to
the word after it only where that is in small letters or a digit. So "Ada" is the same token at
a line's start and within it, and the model needn't learn that two tokens are one name.
"""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from halfmoon_testing.models.byte_tokenizer import train_tokenizer
from tools.demo_model import story_facts, story_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 1664
_WORD = r"'s| ?\p{Ll}+|\p{Lu}\p{Ll}*| ?\p{N}|\s|[^\s\p{L}\p{N}]|\p{L}"
#: Repetitions with which every word of the stories becomes one token.
_REPEATS = 50
_MADE_UP_NAMES = 5000


def make_tokenizer() -> "Tokenizer":
    """Train the tokenizer, the same each time, without special tokens around a text."""
    return train_tokenizer(_texts(), VOCAB_SIZE, _WORD)


def _texts() -> Iterator[str]:
    world = (
        *story_words.NAMES,
        *story_words.KINDS,
        *story_words.STATEMENTS,
        *story_words.BARE_STATEMENTS,
        *story_words.QUESTIONS,
        *story_words.BARE_QUESTIONS,
        *story_words.FILLER_SUBJECTS,
        *story_words.FILLER_VERBS,
        *story_words.FILLER_ENDS,
        *story_words.PREAMBLES,
        *story_words.SYSTEM_PROMPTS,
        *story_words.GREETINGS,
        *story_words.ABOUT,
        story_words.GREETING_ANSWER,
        story_words.ABOUT_ANSWER,
        story_words.NOTED,
        story_words.UNKNOWN,
        *story_words.TOOLS,
        *story_words.PARAMETERS,
        *story_words.RESULTS,
        *story_words.NO_RESULTS,
        *story_words.JSON_REQUESTS,
        *story_words.NUMBER_KEYS,
        *(f"({word}" for word in (*story_words.KINDS, *story_words.PARAMETERS, "get", "find")),
        *(f"_{word}" for word in (*story_words.NUMBER_KEYS, "arguments", "tool", "call", "up")),
        "Tools:",
        *(" 0 1 2 3 4 5 6 7 8 9", "Question: Answer:"),
    )
    text = " ".join(piece.format(name="", kind="", number="", keys="") for piece in world)
    for _ in range(_REPEATS):
        yield text
        yield from ("user\n", "assistant\n", "system\n")
    dice = random.Random(0)
    for _ in range(_MADE_UP_NAMES):
        yield story_facts.invent_name(dice)
