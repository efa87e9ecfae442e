"""What was said so far, and the next request that follows from it. No I/O.

Files go before a message's own words, so that further questions about them share a prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec


class ChatTurn(msgspec.Struct, frozen=True):
    """One question and what was answered."""

    question: str
    answer: str


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that are sent only if somebody wants them."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    priority: int | None = None

    def fields(self) -> dict[str, Any]:
        """Those that are set."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }


@dataclass
class Conversation:
    """A conversation with one model."""

    model: str
    system: str = ""
    wishes: RequestOptions = field(default_factory=RequestOptions)
    turns: list[ChatTurn] = field(default_factory=list)
    #: Files that go with the next message: name and text.
    files: list[tuple[str, str]] = field(default_factory=list)
    #: What was asked last, answered or not; "" before the first question.
    asked: str = ""

    def ask(self, words: str) -> str:
        """The next question: the files that wait, then these words."""
        self.asked = format_question(self.files, words)
        self.files.clear()
        return self.asked

    def ask_again(self) -> str:
        """The last question once more, as if it had not been answered; "" if there is none."""
        if self.turns and self.turns[-1].question == self.asked:
            self.turns.pop()
        return self.asked

    def answered(self, answer: str) -> None:
        """Keep what was answered to the last question."""
        self.turns.append(ChatTurn(self.asked, answer))

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.turns.clear()
        self.files.clear()
        self.asked = ""

    def messages(self, question: str = "") -> list[dict[str, str]]:
        """All that was said, and a question that waits for its answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        if question:
            messages.append({"role": "user", "content": question})
        return messages

    def request(self, question: str) -> dict[str, Any]:
        """The body that asks this question, streamed and with its usage."""
        return {
            "model": self.model,
            "messages": self.messages(question),
            **self.wishes.fields(),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def saved(self) -> bytes:
        """The conversation as a request's body without the question that would follow."""
        body = {"model": self.model, "messages": self.messages()}
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def format_question(files: Sequence[tuple[str, str]], words: str) -> str:
    """One message of files and words."""
    return "\n\n".join([*(f"{name}:\n{text.rstrip()}" for name, text in files), words]).strip()


def read_text(path: Path) -> tuple[str, str]:
    """A file's name and its text, to go with a message.

    Raises:
        OSError: it can't be read.
        ValueError: it is not text.
    """
    try:
        return path.name, path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8 (byte {error.start}): send texts only"
        ) from None
