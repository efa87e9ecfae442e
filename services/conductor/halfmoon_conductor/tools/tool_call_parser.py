"""A model's text taken apart into words and calls.

How calls are written is in `call_syntax`, and what is between their markers in `call_bodies`.
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
from halfmoon_conductor.tools.tool_call_grammars import calls_only_grammar
from halfmoon_conductor.tools.tool_call_syntax import CLOSE, OPEN, tool_call_format_of

__all__ = [
    "ParsedCall",
    "ToolCallFormat",
    "ToolCallParser",
    "ToolCallRules",
    "calls_only_grammar",
    "tool_call_format_of",
]


class ToolCallParser:
    """Text in, words and calls out; what is no call after all comes out as words.

    Args:
        parser: how calls are written.
        most: calls that are wanted; later ones are dropped.
        names: functions on offer.
        place: where calls may be.
    """

    def __init__(
        self,
        parser: ToolCallFormat,
        most: int,
        names: tuple[str, ...] = (),
        place: ToolCallPlace = "free",
    ) -> None:
        self._parser = parser
        self._left = most
        self._names = names
        self._place: ToolCallPlace = place
        self._held = ""
        #: How far closing markers in it have been found to be within strings.
        self._n_judged = 0
        #: Blanks that are words only if other words follow them.
        self._blanks = ""
        #: Whether words have come out: then an answer is no call of llama3_json.
        self._spoke = False
        #: Whether the answer begins with a marker.
        self._leads = False
        self.n_calls = 0
        #: Whether the answer was cut off within a call.
        self.cut_in_call = False

    @classmethod
    def of(cls, calling: ToolCallRules) -> "ToolCallParser":
        """The one for these."""
        return cls(calling.parser, calling.most, calling.names, calling.place)

    def feed(self, text: str) -> tuple[str, list[ParsedCall]]:
        """What is certain with this text."""
        self._held += text
        if not self._may_call():
            words, self._held = self._held, ""
            return self._visible(words), []
        if self._parser == "llama3_json":
            return "", []
        return self._take(in_strings=False)

    def finish(self, *, cut: bool = False) -> tuple[str, list[ParsedCall]]:
        """The rest, at the end of the answer.

        Args:
            cut: by a limit or a stop string, and not by the model. A call that was begun then comes
                out as far as its name is certain, and nothing of it as words. Where a grammar has
                the calls, one that is not whole is always cut off: the model could not end it.
        """
        if not self._may_call():
            calls = None
        elif cut or self._place != "free":
            calls = self._cut_call()
        else:
            calls = self._last_call()
        if calls is not None:
            self._held = ""
            return self._ended(""), calls
        words, calls = "", []
        if self._parser == "hermes":
            words, calls = self._take(in_strings=True)
        words += self._visible(self._held)
        self._held = ""
        return self._ended(words), calls

    def _may_call(self) -> bool:
        """Whether what is held may be, or become, a call."""
        begun = self._held.lstrip()
        if self._parser == "llama3_json":
            return not self._spoke and begun[:1] in ("", "{")
        if self._place != "first" or self._leads:
            return True
        self._leads = not self._spoke and begun.startswith(OPEN)
        return not self._spoke and OPEN.startswith(begun[: len(OPEN)])

    def _take(self, *, in_strings: bool) -> tuple[str, list[ParsedCall]]:
        """Words and whole calls of hermes; what may yet become a call stays held.

        Args:
            in_strings: let a marker within a string end a call that is then no JSON.
        """
        words, calls = "", list[ParsedCall]()
        while (at := self._held.find(OPEN)) >= 0:
            words += self._visible(self._held[:at], before_call=True)
            self._held = self._held[at:]
            body, end = self._closed(in_strings=in_strings)
            if body is None:
                return words, calls
            call = read_call(body)
            if call is None:
                words += self._visible(self._held[:end])
            else:
                calls += self._count(call)
            self._held = self._held[end:]
        cut = len(self._held) - _n_begun(self._held)
        words += self._visible(self._held[:cut])
        self._held = self._held[cut:]
        return words, calls

    def _closed(self, *, in_strings: bool) -> tuple[str | None, int]:
        """The body of the call that is held, and where it ends; None: not yet."""
        start = 0 if in_strings else self._n_judged
        while (end := self._held.find(CLOSE, start)) >= 0:
            body = self._held[len(OPEN) : end]
            if in_strings or not ends_in_string(body):
                self._n_judged = 0
                return body, end + len(CLOSE)
            start = self._n_judged = end + 1
        return None, 0

    def _last_call(self) -> list[ParsedCall] | None:
        """The call that an answer of llama3_json is; None: words."""
        if self._parser != "llama3_json":
            return None
        if self._place != "free" and not begins_with_name(self._held):
            return None
        call = read_call(self._held)
        return None if call is None or not self._offers(call) else self._count(call)

    def _cut_call(self) -> list[ParsedCall] | None:
        """The call, or none, that an answer was cut off in; None: it was cut off in words."""
        if self._parser == "llama3_json":
            begun, body = begins_with_name(self._held), self._held
        else:
            begun, body = self._held.startswith(OPEN), self._held.removeprefix(OPEN)
        if not begun:
            # Where words may be, the beginning of a marker is words.
            if self._place == "free" or (self._place == "exact" and not self.n_calls):
                return None
            if not self._held.strip():
                self.cut_in_call = not self.n_calls
                return []
            body = "" if self._parser == "hermes" else body
        elif not may_begin_call(body, self._names):
            return [] if self._place == "only" else None
        call = read_cut_call(body, self._names)
        if call is not None and not self._offers(call):
            return None
        self.cut_in_call = call is None or not call.whole
        return [] if call is None else self._count(call)

    def _offers(self, call: ParsedCall) -> bool:
        """Whether this is a call: JSON with some name in it may be an answer of llama3_json."""
        return self._parser == "hermes" or not self._names or call.name in self._names

    def _count(self, call: ParsedCall) -> list[ParsedCall]:
        if self._left <= self.n_calls:
            return []
        self.n_calls += 1
        self._blanks = ""
        return [call]

    def _visible(self, words: str, *, before_call: bool = False) -> str:
        """Words with the blanks before them; blanks around and between calls are none."""
        if not words.strip() and (not self._spoke or self.n_calls or before_call):
            self._blanks += words
            return ""
        words, self._blanks = self._blanks + words, ""
        self._spoke = self._spoke or bool(words.strip())
        return words

    def _ended(self, words: str) -> str:
        """Words at the end: blanks that nothing follows are words where there is no call."""
        blanks, self._blanks = self._blanks, ""
        return words if self.n_calls or self.cut_in_call else words + blanks


def _n_begun(text: str) -> int:
    """Characters at the end that may begin a call."""
    return next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
