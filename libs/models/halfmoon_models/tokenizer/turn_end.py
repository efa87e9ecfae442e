"""Find the token that a chat template writes after each of the assistant's answers.

The template is asked for a short conversation with marked texts, and the marks are looked up in
what it wrote. A model was trained to write this token when its answer ends.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

_QUESTION, _ANSWER, _REPLY = "halfmoonquestion", "halfmoonanswer", "halfmoonreply"
#: More characters than any template writes around three short texts.
_MAX_CHARACTERS = 1 << 20

Render = Callable[[Sequence[Mapping[str, Any]]], str]


def find_turn_end(render: Render, added_texts: Collection[str]) -> str | None:
    """Return the text of the token that ends an answer; None if the template shows none.

    The same token must follow the answer where a conversation ends and where it goes on: some
    templates write one token after the last answer, and between answers one that also ends a
    thought. A token that begins a turn is none that ends one.

    Args:
        render: writes messages by the template, without the start of another answer.
        added_texts: of the tokenizer's added tokens.
    """
    for content in (_as_text, _as_parts):
        question = {"role": "user", "content": content(_QUESTION)}
        answer = {"role": "assistant", "content": content(_ANSWER)}
        reply = {"role": "user", "content": content(_REPLY)}
        last = _written(render, [question, answer])
        between = _written(render, [question, answer, reply])
        if _ANSWER in last and _ANSWER in between:
            return _common_end(last, between, added_texts)
    return None


def _common_end(last: str, between: str, added_texts: Collection[str]) -> str | None:
    before, _, after = last.rpartition(_ANSWER)
    opening, _, between_turns = before.rpartition(_QUESTION)
    found = _first(after, added_texts)
    if found is None or _first(between.rpartition(_ANSWER)[2], added_texts) != found:
        return None
    # A template that begins another answer unasked writes what stood before the first one.
    begins_answer = between_turns.strip().endswith(after.strip()) and (
        len(_all(after, added_texts)) == 1
    )
    begins_question = found in _all(opening, added_texts)[-1:]
    return None if begins_answer or begins_question else found


def _as_text(text: str) -> Any:
    return text


def _as_parts(text: str) -> Any:
    return [{"type": "text", "text": text}]


def _written(render: Render, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        text = render(messages)
    except Exception:  # a template is a foreign program, which may refuse any conversation
        return ""
    return text if len(text) <= _MAX_CHARACTERS else ""


def _first(text: str, added_texts: Collection[str]) -> str | None:
    """Return the added token that a text begins with, after white space."""
    stripped = text.lstrip()
    fitting = [each for each in added_texts if each.strip() and stripped.startswith(each)]
    return max(fitting, key=len, default=None)


def _all(text: str, added_texts: Collection[str]) -> list[str]:
    """Return the added tokens of a text, in order."""
    places = [
        (place, each) for each in added_texts if each.strip() and (place := text.rfind(each)) >= 0
    ]
    return [each for _, each in sorted(places, key=lambda pair: (pair[0], len(pair[1])))]
