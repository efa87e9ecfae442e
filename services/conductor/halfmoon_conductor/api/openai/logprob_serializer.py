"""Write log probabilities in OpenAI's and vLLM's shapes."""

from collections.abc import Sequence

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
            name = self._name(token)
            logprobs.tokens.append(name)
            if score is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            logprobs.token_logprobs.append(_finite(score.logprob))
            top: dict[str, float] = {}
            for other, logprob in (*score.top, (token, score.logprob)):
                # Of tokens with the same text, the likeliest one is reported.
                top.setdefault(self._name(other), _finite(logprob))
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
                        logprob=_finite(logprob), rank=rank, decoded_token=self._text(each)
                    )
                    for each, (logprob, rank) in ranked.items()
                }
            )
        return positions

    def _candidate(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._name(token),
            logprob=_finite(logprob),
            bytes=list(self._tokenizer.token_bytes(token)),
        )

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_token_ids else self._text(token)

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
