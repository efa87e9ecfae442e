"""What a streamed answer's events say, of chats and of completions alike."""

from typing import Any

import msgspec

from halfmoon_cli.endpoint.endpoint_errors import StreamBroken, error_text

DONE = b"[DONE]"


class PromptDetails(msgspec.Struct, frozen=True):
    """Where the prompt's KV came from."""

    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    """Tokens of one request, as the endpoint counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def n_out(self) -> int:
        """Tokens of the answer."""
        return self.completion_tokens or 0

    @property
    def n_cached(self) -> int | None:
        """Prompt tokens that were not computed anew; None when the endpoint does not say."""
        return (
            None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens
        )


class StreamDelta(msgspec.Struct, frozen=True):
    """What a chat's answer grew by."""

    content: str | None = None
    #: What a model writes before its answer, in the two names that endpoints use.
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class StreamChoice(msgspec.Struct, frozen=True):
    """One answer's part of an event."""

    #: Of chats.
    delta: StreamDelta | None = None
    #: Of completions.
    text: str | None = None
    finish_reason: str | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """One event."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ends here; None when it goes on."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def text(self) -> str:
        """What the answer grew by; of requests with one answer."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return (choice.delta.content if choice.delta else choice.text) or ""

    @property
    def thoughts(self) -> str:
        """What the model wrote for itself."""
        delta = self.choices[0].delta if self.choices else None
        return (delta.reasoning_content or delta.reasoning or "") if delta else ""

    @property
    def has_tokens(self) -> bool:
        """Whether at least one token came with it, even if it shows as nothing yet."""
        if not self.choices:
            return False
        choice = self.choices[0]
        if choice.delta is None:
            return bool(choice.text) or (choice.text is not None and choice.finish_reason is None)
        delta = choice.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


_decoder = msgspec.json.Decoder(StreamChunk)


def read_chunk(data: bytes) -> StreamChunk:
    """One event's data.

    Raises:
        StreamBroken: it is no such event, or one that tells of an error.
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
