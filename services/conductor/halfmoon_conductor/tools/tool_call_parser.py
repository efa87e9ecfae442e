"""Separate a model's output into text and tool calls.

`tool_call_syntax` defines how calls are written; `tool_call_bodies` parses what is between their
markers.
"""

from halfmoon_conductor.engine_io.tool_call_rules import (
    ToolCallFormat,
    ToolCallPlace,
    ToolCallRules,
)
from halfmoon_conductor.tools.tool_call_bodies import (
    ParsedCall,
    begins_with_name,
    ends_in_string,
    may_begin_call,
    read_call,
    read_cut_call,
)
from halfmoon_conductor.tools.tool_call_syntax import CLOSE, OPEN


class ToolCallParser:
    """Separate text from calls; what turns out to be no call is returned as text.

    Args:
        format: the model's format of calls.
        max_calls: most calls; later ones are dropped.
        names: functions on offer.
        place: where calls may be.
    """

    def __init__(
        self,
        format: ToolCallFormat,
        max_calls: int,
        names: tuple[str, ...] = (),
        place: ToolCallPlace = "free",
    ) -> None:
        self._format = format
        self._max_calls = max_calls
        self._names = names
        self._place: ToolCallPlace = place
        self._buffer = ""
        #: Length of the buffer in which every closing marker is within a string.
        self._n_searched = 0
        #: Whitespace that is text only if other text follows it.
        self._blanks = ""
        #: Whether text was returned: then an answer is no call of llama3_json.
        self._has_text = False
        #: Whether the answer begins with a marker.
        self._starts_with_call = False
        self.n_calls = 0
        #: Whether the answer was cut off within a call.
        self.cut_in_call = False

    @classmethod
    def of(cls, rules: ToolCallRules) -> "ToolCallParser":
        """Return a parser for these rules."""
        return cls(rules.format, rules.max_calls, rules.names, rules.place)

    def feed(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Take more output; return the text and the calls that are certain."""
        self._buffer += text
        if not self._may_call():
            text, self._buffer = self._buffer, ""
            return self._take_text(text), []
        if self._format == "llama3_json":
            return "", []
        return self._take(in_strings=False)

    def finish(self, *, cut: bool = False) -> tuple[str, list[ParsedCall]]:
        """Return the remaining text and calls at the end of the answer.

        Args:
            cut: whether a limit or a stop string ended the answer, and not the model. Then a call
                that was begun is returned as far as its name is certain, and never as text. Where a
                grammar writes the calls, an incomplete one was always cut off: the model could not
                end it.
        """
        if not self._may_call():
            calls = None
        elif cut or self._place != "free":
            calls = self._cut_call()
        else:
            calls = self._last_call()
        if calls is not None:
            self._buffer = ""
            return self._finish_text(""), calls
        text, calls = "", []
        if self._format == "hermes":
            text, calls = self._take(in_strings=True)
        text += self._take_text(self._buffer)
        self._buffer = ""
        return self._finish_text(text), calls

    def _may_call(self) -> bool:
        """Return whether the buffer may be, or become, a call."""
        begun = self._buffer.lstrip()
        if self._format == "llama3_json":
            return not self._has_text and begun[:1] in ("", "{")
        if self._place != "first" or self._starts_with_call:
            return True
        self._starts_with_call = not self._has_text and begun.startswith(OPEN)
        return not self._has_text and OPEN.startswith(begun[: len(OPEN)])

    def _take(self, *, in_strings: bool) -> tuple[str, list[ParsedCall]]:
        """Return text and whole calls of hermes; keep what may yet become a call.

        Args:
            in_strings: let a marker within a string end a call, which is then no JSON.
        """
        text, calls = "", list[ParsedCall]()
        while (at := self._buffer.find(OPEN)) >= 0:
            text += self._take_text(self._buffer[:at], before_call=True)
            self._buffer = self._buffer[at:]
            body, end = self._closed(in_strings=in_strings)
            if body is None:
                return text, calls
            call = read_call(body)
            if call is None:
                text += self._take_text(self._buffer[:end])
            else:
                calls += self._accept(call)
            self._buffer = self._buffer[end:]
        cut = len(self._buffer) - _n_begun(self._buffer)
        text += self._take_text(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return text, calls

    def _closed(self, *, in_strings: bool) -> tuple[str | None, int]:
        """Return the body of the buffered call and where it ends; None while it is incomplete."""
        start = 0 if in_strings else self._n_searched
        while (end := self._buffer.find(CLOSE, start)) >= 0:
            body = self._buffer[len(OPEN) : end]
            if in_strings or not ends_in_string(body):
                self._n_searched = 0
                return body, end + len(CLOSE)
            start = self._n_searched = end + 1
        return None, 0

    def _last_call(self) -> list[ParsedCall] | None:
        """Return the call that a llama3_json answer is; None: it is text."""
        if self._format != "llama3_json":
            return None
        if self._place != "free" and not begins_with_name(self._buffer):
            return None
        call = read_call(self._buffer)
        return None if call is None or not self._offers(call) else self._accept(call)

    def _cut_call(self) -> list[ParsedCall] | None:
        """Return the call that the answer was cut off in, if any; None: it was cut off in text."""
        if self._format == "llama3_json":
            begun, body = begins_with_name(self._buffer), self._buffer
        else:
            begun, body = self._buffer.startswith(OPEN), self._buffer.removeprefix(OPEN)
        if not begun:
            # Where text may be, the beginning of a marker is text.
            if self._place == "free" or (self._place == "exact" and not self.n_calls):
                return None
            if not self._buffer.strip():
                self.cut_in_call = not self.n_calls
                return []
            body = "" if self._format == "hermes" else body
        elif not may_begin_call(body, self._names):
            return [] if self._place == "only" else None
        call = read_cut_call(body, self._names)
        if call is not None and not self._offers(call):
            return None
        self.cut_in_call = call is None or not call.whole
        return [] if call is None else self._accept(call)

    def _offers(self, call: ParsedCall) -> bool:
        """Return whether this is a call on offer.

        JSON with another name may be a llama3_json answer.
        """
        return self._format == "hermes" or not self._names or call.name in self._names

    def _accept(self, call: ParsedCall) -> list[ParsedCall]:
        if self._max_calls <= self.n_calls:
            return []
        self.n_calls += 1
        self._blanks = ""
        return [call]

    def _take_text(self, text: str, *, before_call: bool = False) -> str:
        """Return text with the whitespace before it.

        Whitespace around and between calls is dropped.
        """
        if not text.strip() and (not self._has_text or self.n_calls or before_call):
            self._blanks += text
            return ""
        text, self._blanks = self._blanks + text, ""
        self._has_text = self._has_text or bool(text.strip())
        return text

    def _finish_text(self, text: str) -> str:
        """Return the last text; trailing whitespace is kept if there is no call."""
        blanks, self._blanks = self._blanks, ""
        return text if self.n_calls or self.cut_in_call else text + blanks


def _n_begun(text: str) -> int:
    """Return the number of characters at the end that may begin a marker."""
    return next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
