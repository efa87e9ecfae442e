"""Write log probabilities in OpenAI's and vLLM's shapes."""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from halfmoon_conductor.api.openai.openai_objects import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from halfmoon_conductor.text.echoed_prompt import TextOffsets
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_protocol.logprobs import TokenScore

#: Written for an impossible token, as OpenAI and vLLM do: JSON has no infinity.
LEAST_LOGPROB = -9999.0
#: Tokens whose part of an event is kept: most candidates are of a few thousand.
_KEPT_TOKENS = 32 * 1024

#: A token with its score; None for a first token, which no token precedes.
Scored = tuple[int, TokenScore | None]


class LogprobSerializer:
    """Write log probabilities of tokens.

    Args:
        tokenizer: the model's; turns tokens into texts.
        as_token_ids: write ``token_id:7`` instead of texts, which tells apart tokens with the same
            text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def completion(self, tokens: Sequence[Scored], offsets: Sequence[int]) -> CompletionLogprobs:
        """Return the log probabilities of a completion.

        Args:
            tokens: in order.
            offsets: characters of the text before each of them.
        """
        logprobs = CompletionLogprobs(
            tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets)
        )
        for token, score in tokens:
            name = _name(self._tokenizer, token, self._as_token_ids)
            logprobs.tokens.append(name)
            if score is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            logprobs.token_logprobs.append(_finite(score.logprob))
            top: dict[str, float] = {}
            for other, logprob in (*score.top, (token, score.logprob)):
                # Of tokens with the same text, the likeliest one is reported.
                top.setdefault(_name(self._tokenizer, other, self._as_token_ids), _finite(logprob))
            logprobs.top_logprobs.append(top)
        return logprobs

    def offsets(self, prompt: Sequence[int], echo: str | None) -> TextOffsets:
        """Return what counts a choice's characters; see `TextOffsets`."""
        return TextOffsets(self._tokenizer, prompt, echo)

    def chat(self, tokens: Sequence[Scored]) -> ChatLogprobs:
        """Return the log probabilities of a chat completion."""
        content = [
            TokenLogprob(
                **self._candidate(token, score.logprob).model_dump(),
                top_logprobs=[self._candidate(other, logprob) for other, logprob in score.top],
            )
            for token, score in tokens
            if score is not None
        ]
        return ChatLogprobs(content=content, refusal=None)

    def chat_json(self, token: int, score: TokenScore) -> bytes:
        """Write what `chat` returns of one token, at a tenth of the cost."""
        chosen, *others = _numbers([score.logprob, *(logprob for _, logprob in score.top)])
        start, end = _fragments(self._tokenizer, token, self._as_token_ids)
        written = [b'{"content":[', start, chosen, end, b',"top_logprobs":[']
        for (other, _), number in zip(score.top, others, strict=True):
            start, end = _fragments(self._tokenizer, other, self._as_token_ids)
            written += (start, number, end, b"},")
        if score.top:
            written[-1] = b"}"
        written.append(b']}],"refusal":null}')
        return b"".join(written)

    def completion_json(self, token: int, score: TokenScore, offset: int) -> bytes:
        """Write what `completion` returns of one token, at a fraction of the cost."""
        name = _json_name(self._tokenizer, token, self._as_token_ids)
        candidates = (*score.top, (token, score.logprob))
        numbers = _numbers([logprob for _, logprob in candidates])
        top: dict[bytes, bytes] = {}
        for (other, _), number in zip(candidates, numbers, strict=True):
            top.setdefault(_json_name(self._tokenizer, other, self._as_token_ids), number)
        ranked = b",".join(b"%b:%b" % each for each in top.items())
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[{%b}],"text_offset":[%d]}' % (
            name,
            numbers[-1],
            ranked,
            offset,
        )

    def prompt(self, tokens: Sequence[Scored]) -> PromptLogprobs:
        """Return the log probabilities of a prompt, in vLLM's shape."""
        positions: PromptLogprobs = []
        for token, score in tokens:
            if score is None:
                positions.append(None)
                continue
            ranked = {token: (score.logprob, score.rank)} | {
                other: (logprob, rank) for rank, (other, logprob) in enumerate(score.top, 1)
            }
            positions.append(
                {
                    each: PromptLogprob(
                        logprob=_finite(logprob),
                        rank=rank,
                        decoded_token=_name(self._tokenizer, each, False),
                    )
                    for each, (logprob, rank) in ranked.items()
                }
            )
        return positions

    def _candidate(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=_name(self._tokenizer, token, self._as_token_ids),
            logprob=_finite(logprob),
            bytes=list(self._tokenizer.token_bytes(token)),
        )


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _numbers(logprobs: list[float]) -> list[bytes]:
    """Write numbers as JSON."""
    return msgspec.json.encode([max(each, LEAST_LOGPROB) for each in logprobs])[1:-1].split(b",")


def _name(tokenizer: Tokenizer, token: int, as_token_id: bool) -> str:
    if as_token_id:
        return f"token_id:{token}"
    return tokenizer.token_bytes(token).decode(errors="replace")


@lru_cache(_KEPT_TOKENS)
def _json_name(tokenizer: Tokenizer, token: int, as_token_id: bool) -> bytes:
    return msgspec.json.encode(_name(tokenizer, token, as_token_id))


@lru_cache(_KEPT_TOKENS)
def _fragments(tokenizer: Tokenizer, token: int, as_token_id: bool) -> tuple[bytes, bytes]:
    """Return what stands before and behind a candidate's number; its object stays open."""
    name = _json_name(tokenizer, token, as_token_id)
    own_bytes = msgspec.json.encode(list(tokenizer.token_bytes(token)))
    return b'{"token":%b,"logprob":' % name, b',"bytes":%b' % own_bytes
