"""Read the events of an answer: chunks of ``/v1/completions``, and of SGLang's ``/generate``.

The bytes may be hostile: what is not of the protocol is `ChunkGarbage`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import Count, TokenId
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Finish
from halfmoon_servers.client.generate_call import GeneratedTokens, PairPrefill, ServerUsage

#: Tokens of one chunk; a server sends one, or a few where it speculates or lags behind.
MAX_CHUNK_TOKENS = 65_536
_TOKEN_PREFIX = "token_id:"
_T = TypeVar("_T")
_Tokens = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_CHUNK_TOKENS)]


class ChunkGarbage(ValueError):
    """A chunk that is none of the protocol; the text says why."""


class ChunkAborted(ValueError):
    """The server gave the request up; the text is its reason."""


class ChunkRefused(ValueError):
    """The server sent an error in place of tokens."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = 0
    prompt_tokens_details: _CachedTokens | None = None


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: _Tokens | None = None
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: _CompletionLogprobs | None = None


class _CompletionChunk(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(max_length=1)] = []
    usage: _Usage | None = None
    error: _ErrorBody | str | None = None
    kv_transfer_params: Any = None


class _SglangMeta(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count | None = None
    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[tuple[float | None, TokenId, Any]] | None = None
    output_top_logprobs: list[list[tuple[float | None, TokenId, Any]] | None] | None = None


class _SglangChunk(msgspec.Struct):
    output_ids: Annotated[tuple[TokenId, ...], Meta(max_length=2**21)] | None = None
    meta_info: _SglangMeta | None = None
    error: _ErrorBody | str | None = None


_COMPLETION = msgspec.json.Decoder(_CompletionChunk, strict=True)
_SGLANG = msgspec.json.Decoder(_SglangChunk, strict=True)


class CompletionReader:
    """Reads the chunks of one answer of ``/v1/completions``."""

    def __init__(self, n_top: int | None) -> None:
        """Read scores with `n_top` likeliest tokens; None: no scores."""
        self._n_top = n_top

    def read(self, data: bytes) -> GeneratedTokens | None:
        """Return the tokens of one event; None: it has nothing new.

        Raises:
            ChunkGarbage: it is none of the protocol.
            ChunkAborted: the server gave the request up.
            ChunkRefused: it is an error.
        """
        chunk = _decode(_COMPLETION, data)
        if chunk.error is not None:
            raise _refused(chunk.error)
        usage = _usage(chunk.usage)
        if not chunk.choices:
            return None if usage is None else GeneratedTokens((), usage=usage)
        choice = chunk.choices[0]
        finish = _finish(choice.finish_reason)
        tokens = choice.token_ids
        if tokens is None:
            if choice.text or finish == "":
                raise ChunkGarbage(
                    "a chunk has no token_ids: the server ignores return_token_ids, which vLLM "
                    "has since 0.11"
                )
            tokens = ()
        scores: tuple[TokenScore, ...] = ()
        if self._n_top is not None and tokens:
            scores = _completion_scores(choice.logprobs, len(tokens), self._n_top)
        if not (tokens or finish or usage):
            return None
        return GeneratedTokens(tokens, scores, finish, usage)


class SglangReader:
    """Reads the chunks of one answer of SGLang's ``/generate``.

    A chunk has all tokens so far, or the new ones with ``--incremental-streaming-output``; the
    count of all tokens tells which of them are new.
    """

    def __init__(self, n_top: int | None) -> None:
        self._n_top = n_top
        self._n_read = 0

    def read(self, data: bytes) -> GeneratedTokens | None:
        """Return the tokens of one event; None: it has nothing new.

        Raises:
            ChunkGarbage: it is none of the protocol.
            ChunkAborted: the server gave the request up.
            ChunkRefused: it is an error.
        """
        chunk = _decode(_SGLANG, data)
        if chunk.error is not None:
            raise _refused(chunk.error)
        meta, ids = chunk.meta_info, chunk.output_ids
        if meta is None or ids is None:
            raise ChunkGarbage("a chunk has no output_ids or no meta_info")
        reason = meta.finish_reason or {}
        finish = _sglang_finish(reason)
        n_new = meta.completion_tokens - self._n_read
        matched = reason.get("matched")
        if len(ids) == n_new - 1 and finish == "stop" and isinstance(matched, int):
            ids = (*ids, matched)  # the stop token was cut off
        if not 0 <= n_new <= len(ids):
            raise ChunkGarbage(
                f"a chunk of {len(ids)} tokens counts {meta.completion_tokens} in all, after "
                f"{self._n_read}"
            )
        self._n_read += n_new
        tokens = ids[len(ids) - n_new :]
        scores: tuple[TokenScore, ...] = ()
        if self._n_top is not None and n_new:
            scores = _sglang_scores(meta, n_new, self._n_top)
        usage = None
        if finish:
            usage = ServerUsage(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)
        return GeneratedTokens(tokens, scores, finish, usage) if tokens or finish else None


def read_pair_prefill(data: bytes, n_top: int | None) -> PairPrefill:
    """Read the whole answer of a pair's prefill server: transfer parameters, and one token.

    Raises:
        ChunkGarbage: it has none.
        ChunkAborted: the server gave the request up.
        ChunkRefused: it is an error.
    """
    chunk = _decode(_COMPLETION, data)
    if chunk.error is not None:
        raise _refused(chunk.error)
    params = chunk.kv_transfer_params
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        raise ChunkGarbage(
            "the answer has no kv_transfer_params for a decode server: start the server with "
            "--kv-transfer-config and NixlConnector"
        )
    first = CompletionReader(n_top).read(data)
    if first is None or len(first.token_ids) != 1:
        raise ChunkGarbage("the answer of a prefill server has not one token")
    return PairPrefill(params, first)


def read_error(data: bytes) -> str:
    """Return the message of an error answer, in the shapes that servers write."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return data[:200].decode(errors="replace")
    if isinstance(body, dict):
        error = body.get("error", body)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if message:
            return str(message)
    return str(body)[:200]


def _decode(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ChunkGarbage(f"not a chunk of an answer: {error}") from None


def _refused(error: _ErrorBody | str) -> ChunkRefused:
    if isinstance(error, str):
        return ChunkRefused(500, error)
    code = error.code
    return ChunkRefused(code if isinstance(code, int) and 400 <= code < 600 else 500, error.message)


def _usage(usage: _Usage | None) -> ServerUsage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return ServerUsage(usage.prompt_tokens, usage.completion_tokens or 0, cached)


def _finish(reason: str | None) -> Finish:
    match reason:
        case None | "":
            return ""
        case "stop" | "length":
            return reason
        case _:
            raise ChunkAborted(f"finished by {reason[:100]!r}")


def _sglang_finish(reason: Mapping[str, Any]) -> Finish:
    kind = reason.get("type")
    if kind is not None and not isinstance(kind, str):
        raise ChunkGarbage("finish_reason has no type")
    if kind == "abort":
        raise ChunkAborted(str(reason.get("message", "aborted"))[:200])
    return _finish(kind)


def _completion_scores(
    logprobs: _CompletionLogprobs | None, n_tokens: int, n_top: int
) -> tuple[TokenScore, ...]:
    if logprobs is None or len(logprobs.token_logprobs) != n_tokens:
        raise ChunkGarbage("a chunk has not one log probability for each token")
    tops = logprobs.top_logprobs or [None] * n_tokens
    if len(tops) != n_tokens:
        raise ChunkGarbage("a chunk has not the likeliest tokens of each token")
    return tuple(
        _score(own, [(_named_token(name), each) for name, each in (top or {}).items()], n_top)
        for own, top in zip(logprobs.token_logprobs, tops, strict=True)
    )


def _sglang_scores(meta: _SglangMeta, n_new: int, n_top: int) -> tuple[TokenScore, ...]:
    own = (meta.output_token_logprobs or [])[-n_new:]
    tops = (meta.output_top_logprobs or [None] * n_new)[-n_new:]
    if len(own) != n_new or len(tops) != n_new:
        raise ChunkGarbage("a chunk has not one log probability for each token")
    return tuple(
        _score(
            logprob,
            [(token, each) for each, token, _ in top or () if each is not None],
            n_top,
        )
        for (logprob, _, _), top in zip(own, tops, strict=True)
    )


def _score(own: float | None, listed: Sequence[tuple[int, float]], n_top: int) -> TokenScore:
    if own is None:
        raise ChunkGarbage("a token has no log probability")
    rank = 1 + sum(logprob > own for _, logprob in listed)
    top = tuple(sorted(listed, key=lambda pair: -pair[1])[:n_top])
    return TokenScore(own, rank, top)


def _named_token(name: str) -> int:
    digits = name.removeprefix(_TOKEN_PREFIX)
    if digits == name or not (digits.isascii() and digits.isdigit()) or len(digits) > 10:
        raise ChunkGarbage("a likeliest token is not named by its id")
    return int(digits)
