"""Find where a text ends because it contains a stop string.

The first stop string to be *complete* ends the text, just before its own first character. Of
several that are complete at the same character, the longest counts. The result depends on the text
alone, not on its division into tokens.

Each stop string has an automaton (Knuth, Morris and Pratt), whose state is the number of its
characters that the text ends with. So a character costs O(1) per stop string, and the longest state
is exactly the number of characters to hold back.
"""

from collections.abc import Sequence


class StopStringMatcher:
    """Read a text piece by piece and cut it at the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would end every text at its start")
        self._automata = [_Automaton(stop) for stop in stops]
        #: End of the text that may be the beginning of a stop string.
        self._held = ""
        #: The stop string that ended the text; nothing is returned after it.
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take more text; return the part that no stop string can contain."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return piece
        text = self._held + piece
        for position, character in enumerate(piece, start=len(self._held) + 1):
            complete = [a.pattern for a in self._automata if a.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return text[: position - len(self.matched)]
        n_held = max(automaton.state for automaton in self._automata)
        safe, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        return safe

    def flush(self) -> str:
        """Return the text held back, now that the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def check(self) -> None:
        """Check that the text held back is the longest beginning of a stop string."""
        states = [automaton.state for automaton in self._automata]
        if self.matched is None and self._held:
            assert len(self._held) == max(states)
            longest = self._automata[states.index(max(states))]
            assert longest.pattern.startswith(self._held)


class _Automaton:
    """One stop string, and how much of it the text ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        #: Number of characters of `pattern` that the text ends with; less than all, except after a
        #: match.
        self.state = 0
        #: For each matched length: the next shorter beginning that the matched text ends with.
        self._shorter = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Take one character; return whether the text now ends with the whole pattern."""
        while self.state and self.pattern[self.state] != character:
            self.state = self._shorter[self.state]
        if self.pattern[self.state] == character:
            self.state += 1
        return self.state == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """Return for each length n the longest proper beginning of pattern[:n] that also ends it."""
    borders = [0, 0]
    length = 0
    for character in pattern[1:]:
        while length and pattern[length] != character:
            length = borders[length]
        if pattern[length] == character:
            length += 1
        borders.append(length)
    return borders
