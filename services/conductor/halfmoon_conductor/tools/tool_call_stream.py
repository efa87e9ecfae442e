"""A model's text as it comes, taken apart into words and calls in their order."""

from collections.abc import Iterable

from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallRules
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser

#: Words, or a call.
TextOrCall = str | ParsedCall


class ToolCallStream:
    """Pieces in, parts out; each piece's words come before its calls.

    Args:
        calling: the calls that there may be; None: all is words.
    """

    def __init__(self, calling: ToolCallRules | None) -> None:
        self._reader = None if calling is None else ToolCallParser.of(calling)

    @property
    def may_call(self) -> bool:
        """Whether what comes may be a call, so that words are not certain to come at all."""
        return self._reader is not None

    @property
    def n_calls(self) -> int:
        """Calls so far."""
        return 0 if self._reader is None else self._reader.n_calls

    @property
    def cut_in_call(self) -> bool:
        """Whether the text was cut off within a call."""
        return self._reader is not None and self._reader.cut_in_call

    def feed(self, piece: OutputPiece) -> list[TextOrCall]:
        """What is certain with this piece; with the last one, all."""
        if self._reader is None:
            return [piece.text] if piece.text else []
        parts = list(_parts(*self._reader.feed(piece.text)))
        if piece.finish:
            parts += _parts(*self._reader.finish(cut=piece.is_cut))
        return parts


def join_adjacent_text(parts: Iterable[TextOrCall]) -> list[TextOrCall]:
    """The same with no two words side by side."""
    whole: list[TextOrCall] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def _parts(words: str, calls: list[ParsedCall]) -> list[TextOrCall]:
    return [words, *calls] if words else [*calls]
