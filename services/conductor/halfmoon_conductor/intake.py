"""From what a client sent to what the gateway generates: text to tokens, and every limit.

What a field means by itself is checked by `openai_requests`; here is what needs the model: its
name, its tokenizer, its chat template and its context.
"""

import asyncio
import secrets
from uuid import uuid4

import msgspec

from halfmoon_conductor.chat_template import ChatTemplate
from halfmoon_conductor.errors import InvalidRequest, ModelNotFound, TooLong, Unavailable
from halfmoon_conductor.generation import Gateway, GenerationRequest, ModelCard
from halfmoon_conductor.openai_requests import ChatRequest, CompletionRequest, SharedFields
from halfmoon_conductor.tokenizer import Tokenizer
from halfmoon_protocol.sampling import Sampling, Stopping

#: New tokens of a completion that doesn't say how many, as OpenAI has it.
DEFAULT_COMPLETION_TOKENS = 16
#: Below this, dividing logits by the temperature overflows: it is greedy in all but name.
LEAST_TEMPERATURE = 1e-5
#: How soon to ask again while workers are still loading the model.
RETRY_WHILE_LOADING_S = 2.0
_SEED_MASK = 2**63 - 1


class Order(msgspec.Struct, frozen=True):
    """A request, ready for the gateway, and what the front itself must do with its tokens."""

    generation: GenerationRequest
    stop_strings: tuple[str, ...] = ()

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.generation.prompt_token_ids)


class Intake:
    """Makes orders of requests.

    Raises:
        TokenizerUnavailable: the tokenizer's chat template is not valid.
    """

    def __init__(self, gateway: Gateway, tokenizer: Tokenizer) -> None:
        self._gateway = gateway
        self._tokenizer = tokenizer
        source = tokenizer.chat_template
        self._template = ChatTemplate(source, tokenizer.special_tokens) if source else None

    def card(self, name: str) -> ModelCard:
        """The model of this name.

        Raises:
            Unavailable: no worker has joined yet.
            ModelNotFound: another one is served.
        """
        card = self._gateway.model
        if card is None:
            raise Unavailable(
                "No worker has joined yet, so no model is served; try again soon.",
                retry_after_s=RETRY_WHILE_LOADING_S,
            )
        if name != card.name:
            raise ModelNotFound(
                f"The model {name!r} is not served here; {card.name!r} is.", param="model"
            )
        return card

    async def completion(self, body: CompletionRequest) -> Order:
        """The order of a completion.

        Raises:
            ModelNotFound, Unavailable: as `card`.
            InvalidRequest: a prompt without tokens, or with ids that the model doesn't have.
            TooLong: prompt and new tokens don't fit into the context.
        """
        card = self.card(body.model)
        prompt = body.sole_prompt
        if isinstance(prompt, str):
            add_special_tokens = body.add_special_tokens is not False
            token_ids = await asyncio.to_thread(self._encode, prompt, add_special_tokens, "prompt")
        else:
            token_ids = self._checked(prompt)
        if not token_ids:
            raise InvalidRequest(
                "The prompt is empty, and this model has no token of its own to begin with.",
                param="prompt",
            )
        default = min(DEFAULT_COMPLETION_TOKENS, card.max_context - len(token_ids))
        return self._order("cmpl", body, token_ids, card, default, "prompt")

    async def chat(self, body: ChatRequest) -> Order:
        """The order of a chat completion.

        Raises:
            ModelNotFound, Unavailable: as `card`.
            InvalidRequest: no chat template, or it refuses the conversation.
            TooLong: conversation and new tokens don't fit into the context.
        """
        card = self.card(body.model)
        token_ids = await asyncio.to_thread(self._encode_chat, body)
        if not token_ids:
            raise InvalidRequest("The conversation has no tokens.", param="messages")
        return self._order(
            "chatcmpl", body, token_ids, card, card.max_context - len(token_ids), "messages"
        )

    def _order(
        self,
        prefix: str,
        body: SharedFields,
        token_ids: list[int],
        card: ModelCard,
        default_new_tokens: int,
        param: str,
    ) -> Order:
        n_prompt, asked = len(token_ids), body.n_new_tokens
        if n_prompt + (asked or 1) > card.max_context:
            raise TooLong(
                f"This model's context is {card.max_context} tokens; the prompt has {n_prompt}, "
                f"and {asked or 'at least 1'} more were asked for. Shorten the prompt or ask "
                "for fewer new tokens.",
                param=param,
            )
        max_new_tokens = default_new_tokens if asked is None else asked
        if (body.min_tokens or 0) > max_new_tokens:
            raise InvalidRequest(
                f"min_tokens is {body.min_tokens}, over the {max_new_tokens} new tokens that "
                "this request has without max_tokens; send max_tokens too.",
                param="min_tokens",
            )
        eos = () if body.ignore_eos else self._tokenizer.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos, *(body.stop_token_ids or ()))))
        return Order(
            GenerationRequest(
                request_id=f"{prefix}-{uuid4().hex}",
                prompt_token_ids=tuple(token_ids),
                sampling=_sampling(body),
                stopping=Stopping(
                    max_new_tokens=max_new_tokens,
                    stop_token_ids=stop_token_ids,
                    min_new_tokens=body.min_tokens or 0,
                ),
                salt=body.cache_salt or "",
                ttft_slo_s=body.ttft_slo_s,
                tbt_slo_s=body.tbt_slo_s,
            ),
            body.stop_strings,
        )

    def _encode_chat(self, body: ChatRequest) -> list[int]:
        if self._template is None:
            raise InvalidRequest(
                f"The model {body.model!r} has no chat template; use /v1/completions."
            )
        text = self._template.render(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
        )
        # The template has written BOS where the model wants one.
        return self._encode(text, False, "messages")

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} is not Unicode text: {error.reason}", param=param
            ) from None

    def _checked(self, token_ids: list[int]) -> list[int]:
        if (largest := max(token_ids)) >= self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"prompt has the token id {largest}; this model's are less than "
                f"{self._tokenizer.vocab_size}.",
                param="prompt",
            )
        return token_ids


def _sampling(body: SharedFields) -> Sampling:
    """The client's wishes, with OpenAI's defaults for what it left out."""
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        # Drawn here, once: a request that is placed again goes on with the same dice.
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
    )
