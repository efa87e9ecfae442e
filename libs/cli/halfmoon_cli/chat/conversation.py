"""Keep the turns of a conversation and build the next request. No I/O.

Files go before a message's own words, so that further questions about them share a prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec


class ChatTurn(msgspec.Struct, frozen=True):
    """One question and its answer."""

    question: str
    answer: str


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Optional fields of a request; those that are None are not sent."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    priority: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields that are set."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }


@dataclass
class Conversation:
    """A conversation with one model."""

    model: str
    system: str = ""
    options: RequestOptions = field(default_factory=RequestOptions)
    turns: list[ChatTurn] = field(default_factory=list)
    #: Names and texts of files that go with the next message.
    files: list[tuple[str, str]] = field(default_factory=list)
    #: The last question, answered or not; "" before the first.
    last_question: str = ""

    def ask(self, words: str) -> str:
        """Make the next question of the waiting files and these words, and return it."""
        self.last_question = format_question(self.files, words)
        self.files.clear()
        return self.last_question

    def ask_again(self) -> str:
        """Drop the answer to the last question and return the question; "" without one."""
        if self.turns and self.turns[-1].question == self.last_question:
            self.turns.pop()
        return self.last_question

    def answered(self, answer: str) -> None:
        """Keep the answer to the last question."""
        self.turns.append(ChatTurn(self.last_question, answer))

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.turns.clear()
        self.files.clear()
        self.last_question = ""

    def messages(self, question: str = "") -> list[dict[str, str]]:
        """Return the messages of all turns, and of a question that has no answer yet."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        if question:
            messages.append({"role": "user", "content": question})
        return messages

    def request(self, question: str) -> dict[str, Any]:
        """Return the body of a streamed request with this question."""
        return {
            "model": self.model,
            "messages": self.messages(question),
            **self.options.fields(),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def saved(self) -> bytes:
        """Return the conversation as the JSON of a request, without a further question."""
        body = {"model": self.model, "messages": self.messages()}
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def format_question(files: Sequence[tuple[str, str]], words: str) -> str:
    """Join files and words into one message."""
    return "\n\n".join([*(f"{name}:\n{text.rstrip()}" for name, text in files), words]).strip()


def read_text(path: Path) -> tuple[str, str]:
    """Return the name and the text of a file, to go with a message.

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
