"""Where a text ends because it says one of the stop strings.

The first stop string to be *complete* ends the text, just before its own first character;
of several that are complete at the same character, the longest. That depends on the text
alone, not on how it was cut into tokens.

Each stop string is followed by an automaton (Knuth, Morris and Pratt): its state is how many
of its characters the text ends with. So a character costs O(1) per stop string, and the
longest state is exactly how much must be held back.
"""

from collections.abc import Sequence


class StopStringMatcher:
    """Follows a text piece by piece and cuts it at the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would end every text at its start")
        self._automata = [_Automaton(stop) for stop in stops]
        #: End of the text that may yet turn out to begin a stop string.
        self._held = ""
        #: The stop string that ended the text; nothing comes out after it.
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take more of the text; returns what is certain to lie before any stop string."""
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
        """What was held back, now that the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def check(self) -> None:
        """Audit: what is held back is the longest beginning of a stop string."""
        states = [automaton.state for automaton in self._automata]
        if self.matched is None and self._held:
            assert len(self._held) == max(states)
            longest = self._automata[states.index(max(states))]
            assert longest.pattern.startswith(self._held)


class _Automaton:
    """One stop string and how much of it the text ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        #: Characters of `pattern` that the text ends with; less than all but after a match.
        self.state = 0
        #: For each length of a matched beginning: the next shorter one that it ends with.
        self._shorter = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Take one character; True when the text now ends with the whole pattern."""
        while self.state and self.pattern[self.state] != character:
            self.state = self._shorter[self.state]
        if self.pattern[self.state] == character:
            self.state += 1
        return self.state == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each length n: the longest proper beginning of pattern[:n] that also ends it."""
    borders = [0, 0]
    length = 0
    for character in pattern[1:]:
        while length and pattern[length] != character:
            length = borders[length]
        if pattern[length] == character:
            length += 1
        borders.append(length)
    return borders
