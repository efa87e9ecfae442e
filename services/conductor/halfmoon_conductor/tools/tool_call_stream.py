"""Separate a streamed answer into text and calls, in their order."""

from collections.abc import Iterable

from halfmoon_conductor.engine_io.output_piece import OutputPiece
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallRules
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser

#: Text, or a call.
TextOrCall = str | ParsedCall


class ToolCallStream:
    """Turn pieces into text and calls; each piece's text comes before its calls.

    Args:
        rules: the calls that there may be; None: all is text.
    """

    def __init__(self, rules: ToolCallRules | None) -> None:
        self._parser = None if rules is None else ToolCallParser.of(rules)

    @property
    def may_call(self) -> bool:
        """True if the answer may contain calls, so that text is not certain to come at all."""
        return self._parser is not None

    @property
    def n_calls(self) -> int:
        """Calls so far."""
        return 0 if self._parser is None else self._parser.n_calls

    @property
    def cut_in_call(self) -> bool:
        """True if the answer was cut off within a call."""
        return self._parser is not None and self._parser.cut_in_call

    def feed(self, piece: OutputPiece) -> list[TextOrCall]:
        """Return the text and calls that are certain with this piece; with the last piece, all."""
        if self._parser is None:
            return [piece.text] if piece.text else []
        parts = list(_as_parts(*self._parser.feed(piece.text)))
        if piece.finish:
            parts += _as_parts(*self._parser.finish(cut=piece.is_cut))
        return parts


def join_adjacent_text(parts: Iterable[TextOrCall]) -> list[TextOrCall]:
    """Join adjacent texts."""
    whole: list[TextOrCall] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def _as_parts(text: str, calls: list[ParsedCall]) -> list[TextOrCall]:
    return [text, *calls] if text else [*calls]
