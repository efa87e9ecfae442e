"""Separate what a model thinks from what it answers.

Qwen3, DeepSeek-R1 and models made like them think between ``<think>`` and ``</think>``, then
answer. Some write the first marker, for others it is the end of the prompt.
"""

from typing import Literal

from halfmoon_conductor.engine_io.engine_request import ReasoningStart

OPEN, CLOSE = "<think>", "</think>"


def reasons(template: str) -> bool:
    """Return whether a model with this chat template has learned to think between markers."""
    return CLOSE in template


def reasoning_start_of(prompt_end: str) -> ReasoningStart:
    """Return whether thinking has begun at the end of a prompt, or may begin the answer."""
    return "begun" if prompt_end.rstrip().endswith(OPEN) else "possible"


class ReasoningParser:
    """Take an answer apart; whitespace around the markers belongs to neither part.

    Args:
        start: whether the first text is a thought already.
    """

    def __init__(self, start: ReasoningStart) -> None:
        self._state: Literal["before", "inside", "behind", "answer"] = (
            "inside" if start == "begun" else "before"
        )
        #: Text that may yet be a marker, or whitespace beside one.
        self._buffer = ""
        self._has_thought = False
        #: Tokens that are thoughts or markers.
        self.n_tokens = 0

    def feed(self, text: str) -> tuple[str, str]:
        """Take the text of one more token; return the thoughts and the answer that are certain."""
        begun = self._state == "inside"
        self._buffer += text
        thoughts = self._think() if self._state in ("before", "inside") else ""
        if begun or self._state == "inside":
            self.n_tokens += 1
        return thoughts, self._answer() if self._state in ("behind", "answer") else ""

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Take the text of one more token; with the last one, return also what is left."""
        thoughts, answer = self.feed(text)
        if is_last:
            last_thoughts, last_answer = self.finish()
            thoughts, answer = thoughts + last_thoughts, answer + last_answer
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """Return what is left at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._state == "inside":
            return rest, ""
        return "", "" if self._state == "behind" else rest

    def _think(self) -> str:
        """Return thoughts; go on to the answer where they end, or where there are none."""
        if self._state == "before":
            begun = self._buffer.lstrip()
            if OPEN.startswith(begun[: len(OPEN)]):
                if not begun.startswith(OPEN):
                    return ""  # it may become a marker
                self._state, self._buffer = "inside", begun[len(OPEN) :]
            else:
                self._state = "answer"
                return ""
        if not self._has_thought:
            self._buffer = self._buffer.lstrip()
        thought, closed, behind = self._buffer.partition(CLOSE)
        if closed:
            self._state, self._buffer = "behind", behind
            return thought.rstrip()
        kept = len(self._buffer) - _n_begun(self._buffer)
        kept = len(self._buffer[:kept].rstrip())
        thought, self._buffer = self._buffer[:kept], self._buffer[kept:]
        self._has_thought = self._has_thought or bool(thought)
        return thought

    def _answer(self) -> str:
        if self._state == "behind":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "answer"
        text, self._buffer = self._buffer, ""
        return text


def _n_begun(text: str) -> int:
    """Return the number of characters at the end that may begin the closing marker."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
