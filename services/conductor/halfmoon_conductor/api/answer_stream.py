"""Separate a streamed answer into thoughts, text and calls, in their order."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from halfmoon_conductor.engine_io.engine_request import EngineRequest
from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.reasoning.reasoning_parser import ReasoningParser
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser


class Thought(NamedTuple):
    """A part of what the model thought before its answer."""

    text: str


#: A thought, text of the answer, or a call.
AnswerPart = Thought | str | ParsedCall


class AnswerStream:
    """Turn pieces into parts; thoughts come first, and each piece's text before its calls.

    Args:
        request: says whether the answer may have thoughts, and which calls.
    """

    def __init__(self, request: EngineRequest) -> None:
        rules, start = request.tool_call_rules, request.reasoning_start
        self._calls = None if rules is None else ToolCallParser.of(rules)
        self._thoughts = None if start is None else ReasoningParser(start)

    @property
    def begins_with_text(self) -> bool:
        """True if the answer can only begin with text: there are no calls and no thoughts."""
        return self._calls is None and self._thoughts is None

    @property
    def n_calls(self) -> int:
        """Calls so far."""
        return 0 if self._calls is None else self._calls.n_calls

    @property
    def n_thought_tokens(self) -> int:
        """Tokens of thoughts and their markers so far."""
        return 0 if self._thoughts is None else self._thoughts.n_tokens

    @property
    def cut_in_call(self) -> bool:
        """True if the answer was cut off within a call."""
        return self._calls is not None and self._calls.cut_in_call

    def feed(self, piece: OutputPiece) -> Iterator[AnswerPart]:
        """Yield the parts that are certain with this piece; with the last piece, all."""
        thought, text = "", piece.text
        if self._thoughts is not None:
            thought, text = self._thoughts.read(piece.text, is_last=bool(piece.finish))
        if thought:
            yield Thought(thought)
        if self._calls is None:
            if text:
                yield text
            return
        yield from _text_and_calls(*self._calls.feed(text))
        if piece.finish:
            yield from _text_and_calls(*self._calls.finish(cut=piece.is_cut))


def join_adjacent(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Join adjacent thoughts, and adjacent texts."""
    whole: list[AnswerPart] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, str) and isinstance(last, str):
            whole[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            whole[-1] = Thought(last.text + part.text)
        else:
            whole.append(part)
    return whole


def _text_and_calls(text: str, calls: list[ParsedCall]) -> list[AnswerPart]:
    return [text, *calls] if text else [*calls]
