"""Parse the events of streamed chats and completions."""

from typing import Any

import msgspec

from halfmoon_cli.endpoint.endpoint_errors import StreamBroken, error_text

DONE = b"[DONE]"


class PromptDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    """Token counts of one request by the endpoint."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def n_out(self) -> int:
        """Tokens of the answer."""
        return self.completion_tokens or 0

    @property
    def n_cached(self) -> int | None:
        """Prompt tokens served from a cache; None when the endpoint does not say."""
        return (
            None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens
        )


class StreamDelta(msgspec.Struct, frozen=True):
    """The increment of a chat's answer."""

    content: str | None = None
    #: Reasoning before the answer, under the two names that endpoints use.
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class StreamChoice(msgspec.Struct, frozen=True):
    """The part of an event that belongs to one answer."""

    #: Set for chats.
    delta: StreamDelta | None = None
    #: Set for completions.
    text: str | None = None
    finish_reason: str | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None

    @property
    def finish_reason(self) -> str | None:
        """Reason for the answer's end; None while it goes on."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def text(self) -> str:
        """Text that the event adds to the only answer."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return (choice.delta.content if choice.delta else choice.text) or ""

    @property
    def thoughts(self) -> str:
        """Reasoning that the event adds."""
        delta = self.choices[0].delta if self.choices else None
        return (delta.reasoning_content or delta.reasoning or "") if delta else ""

    @property
    def has_tokens(self) -> bool:
        """True when the event has at least one token, even without text."""
        if not self.choices:
            return False
        choice = self.choices[0]
        if choice.delta is None:
            return bool(choice.text) or (choice.text is not None and choice.finish_reason is None)
        delta = choice.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


_decoder = msgspec.json.Decoder(StreamChunk)


def read_chunk(data: bytes) -> StreamChunk:
    """Parse the data of one event.

    Raises:
        StreamBroken: it is no such event, or it reports an error.
    """
    try:
        chunk = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StreamBroken(
            f"the stream has an event that is no chunk of an answer: {error}"
        ) from None
    if chunk.error is not None:
        raise StreamBroken(f"the answer was given up: {error_text(chunk.error)}")
    return chunk
