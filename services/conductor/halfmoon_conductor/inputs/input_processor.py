"""From what a client sent to what the gateway generates: text to tokens, and every limit.

What a field means by itself is checked by `openai_requests`; here is what needs the model: its
name, its tokenizer, its chat template and its context.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

import msgspec

from halfmoon_conductor.api.openai.chat_messages import CallingMessage, ChatMessage
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.engine_io.engine_request import EngineRequest
from halfmoon_conductor.engine_io.gateway_interface import Gateway, GenerationRequest, ModelCard
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotSupported,
    ServiceUnavailable,
    UnknownModel,
)
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_conductor.http_server.request_context import RequestContext
from halfmoon_conductor.inputs.inline_limits import (
    MAX_INLINE_RENDERED_CHARACTERS,
    InlineLimitExceeded,
)
from halfmoon_conductor.inputs.preparation_messages import PreparedBody
from halfmoon_conductor.inputs.tool_constraints import grammar_of_chat, tool_call_rules_of
from halfmoon_conductor.text.chat_template import ChatTemplate
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_conductor.tools.tool_call_syntax import tool_call_format_of
from halfmoon_protocol.sampling import Sampling, Stopping

#: New tokens of a completion that doesn't say how many, as OpenAI has it.
DEFAULT_COMPLETION_TOKENS = 16
#: Below this, dividing logits by the temperature overflows: it is greedy in all but name.
LEAST_TEMPERATURE = 1e-5
#: How soon to ask again while workers are still loading the model.
RETRY_WHILE_LOADING_S = 2.0
#: Scores of prompts in one answer. Those of a prompt travel in one message, which is read where
#: streams wait for it.
MAX_PROMPT_SCORES = 100_000
#: Tokens of all prompts of a request, times its choices, where there are several: they are queued
#: at once, before whatever comes after them.
MAX_PROMPT_TOKENS = 2 << 20
#: Token ids of prompts in one answer, and characters.
MAX_RETURNED_TOKEN_IDS = 1 << 20
MAX_ECHOED_CHARACTERS = 16 << 20
_SHOWN_CHARACTERS = 200
_SEED_MASK = 2**63 - 1


class InputProcessor:
    """Makes orders of requests.

    Args:
        gateway: where tokens come from.
        tokenizer: the model's.
        tool_call_parser: how the model writes calls; "auto": as its chat template shows.
        grammars: checks them; None: one is made when the first grammar comes.

    Raises:
        TokenizerUnavailable: the tokenizer's chat template is not valid.
    """

    def __init__(
        self,
        gateway: Gateway,
        tokenizer: Tokenizer,
        tool_call_parser: ToolCallFormat | Literal["auto"] = "auto",
        grammars: GrammarChecker | None = None,
    ) -> None:
        self._gateway = gateway
        self._tokenizer = tokenizer
        self._grammars = grammars
        source = tokenizer.chat_template
        self._tool_parser = (
            tool_call_format_of(source or "") if tool_call_parser == "auto" else tool_call_parser
        )
        self._template = ChatTemplate(source, tokenizer.special_tokens) if source else None

    def card(self, name: str | None) -> ModelCard:
        """The model of this name; the one that is served if there is none.

        Raises:
            Unavailable: no worker has joined yet.
            ModelNotFound: another one is served.
        """
        card = self._gateway.model
        if card is None:
            raise ServiceUnavailable(
                "No worker has joined yet, so no model is served; try again soon.",
                retry_after_s=RETRY_WHILE_LOADING_S,
            )
        if name not in (None, card.name):
            raise UnknownModel(
                f"The model {_shown(name or '')} is not served here; {card.name!r} is.",
                param="model",
            )
        return card

    async def completion(
        self, body: CompletionRequest, asker: RequestContext, prepared: PreparedBody | None = None
    ) -> EngineRequest:
        """The order of a completion.

        Args:
            body: what the client sent.
            asker: who sent it.
            prepared: what a helper made of it; None: it is short, and read here.

        Raises:
            ModelNotFound, Unavailable: as `card`.
            InvalidRequest: a prompt without tokens, or with ids that the model doesn't have.
            TooLong: prompt and new tokens don't fit into the context.
        """
        card = self.card(body.model)
        prompts = self.prompts_of(body) if prepared is None else prepared.prompts()
        grammar = await self._grammar(body.wanted) if body.constrains else ""
        order = self._order(
            "cmpl", body, prompts, card, asker, DEFAULT_COMPLETION_TOKENS, "prompt", grammar
        )
        echoes = self.echoes_of(body) if prepared is None else prepared.echoes
        if (n_echoed := order.n_per_prompt * sum(map(len, echoes))) > MAX_ECHOED_CHARACTERS:
            raise ContextLengthExceeded(
                f"echo would repeat {n_echoed} characters, over the {MAX_ECHOED_CHARACTERS} that "
                "one answer may; ask for fewer choices.",
                param="echo",
            )
        return msgspec.structs.replace(order, echoes=echoes) if echoes else order

    def prompts_of(self, body: CompletionRequest) -> list[list[int]]:
        """Token ids of a completion's prompts. Not for the event loop unless they are short.

        Raises:
            InvalidRequest: a prompt without tokens, or with ids that the model doesn't have.
            TooLong: one doesn't fit into the context.
        """
        prompts = self._encode_prompts(body)
        if not all(prompts):
            raise InvalidRequest(
                "The prompt is empty, and this model has no token of its own to begin with.",
                param="prompt",
            )
        for prompt in prompts:
            self._check_fits(body, len(prompt), "prompt")
        return prompts

    def echoes_of(self, body: CompletionRequest) -> tuple[str, ...]:
        """What the answers to a completion begin with; nothing unless it asks for it."""
        if not body.echo:
            return ()
        return tuple(
            given if isinstance(given, str) else self._tokenizer.decode(given)
            for given in body.prompts
        )

    async def chat(
        self, body: ChatRequest, asker: RequestContext, prepared: PreparedBody | None = None
    ) -> EngineRequest:
        """The order of a chat completion.

        Args:
            body: what the client sent.
            asker: who sent it.
            prepared: what a helper made of it; None: it is short, and read here.

        Raises:
            ModelNotFound, Unavailable: as `card`.
            InvalidRequest: no chat template, or it refuses the conversation.
            TooLong: conversation and new tokens don't fit into the context.
            NotShort: it is much work after all.
        """
        card = self.card(body.model)
        calling = tool_call_rules_of(body, self._parser(body))
        if prepared is None:
            token_ids = self.checked_conversation(body, here=True)
        else:
            (token_ids,) = prepared.prompts()
        constrained = body.constrains or (calling is not None and calling.place != "free")
        grammar = await self._grammar(lambda: grammar_of_chat(body, calling)) if constrained else ""
        order = self._order(
            "chatcmpl", body, [token_ids], card, asker, card.max_context, "messages", grammar
        )
        return msgspec.structs.replace(order, calling=calling)

    def checked_conversation(self, body: ChatRequest, *, here: bool = False) -> list[int]:
        """Token ids of a chat that is to be answered; see `conversation`.

        Raises:
            InvalidRequest, NotSupported, TooLong, NotShort: as `conversation`, and if it has no
                tokens, or too many.
        """
        token_ids = self.conversation(body, here=here)
        if not token_ids:
            raise InvalidRequest("The conversation has no tokens.", param="messages")
        self._check_fits(body, len(token_ids), "messages")
        return token_ids

    def _parser(self, body: ChatRequest) -> ToolCallFormat | None:
        """How this model calls tools, if it is offered some.

        Raises:
            NotSupported: nobody knows.
        """
        if not body.offered:
            return None
        if self._tool_parser is None:
            raise NotSupported(
                "tools is not supported with this model: how it writes calls is not known from "
                "its chat template; start the conductor with --tool-call-parser.",
                param="tools",
            )
        return self._tool_parser

    async def _grammar(self, wish: Callable[[], RequestedGrammar | None]) -> str:
        """What the answer must be, known to compile; empty: anything."""
        wanted = await asyncio.to_thread(wish)
        if wanted is None:
            return ""
        if not self._tokenizer.knows_grammars:
            raise NotSupported(
                f"{wanted.param} is not supported with this model, which has no texts for its "
                "tokens or no token that ends an answer.",
                param=wanted.param,
            )
        if self._grammars is None:
            self._grammars = GrammarChecker.of(self._tokenizer)
        return await self._grammars.check(wanted)

    def conversation(self, body: ChatRequest, *, here: bool = False) -> list[int]:
        """A chat as the tokens that its model goes on with, tools included.

        Args:
            body: what the client sent.
            here: on the event loop, where much work is not begun.

        Raises:
            InvalidRequest: no chat template, or it refuses the conversation.
            NotSupported: it offers tools, and how the model calls them is not known.
            TooLong: its text can't fit into the context.
            NotShort: `here`, and it is much work.
        """
        self._parser(body)
        return self.encode_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=self._variables(body),
            tools=[tool.for_template() for tool in body.offered],
            here=here,
        )

    def _variables(self, body: ChatRequest) -> Mapping[str, Any] | None:
        """What the chat template is to read beside the conversation."""
        given = body.chat_template_kwargs
        return self._template.with_effort(given, body.reasoning_effort) if self._template else given

    def encode_messages(
        self,
        messages: Sequence[ChatMessage | CallingMessage],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        here: bool = False,
    ) -> list[int]:
        """A conversation as tokens; see `conversation`.

        Raises:
            InvalidRequest, TooLong, NotShort: as `conversation`.
        """
        if self._template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.")
        if here and variables and not all(map(_is_plain, variables.values())):
            raise InlineLimitExceeded  # a template may do anything with a number or a list
        text = self._template.render(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            tools=tools,
        )
        if here and len(text) > MAX_INLINE_RENDERED_CHARACTERS:
            raise InlineLimitExceeded
        # The template has written BOS where the model wants one.
        return self._encode(text, False, "messages")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A text as tokens; not for the event loop either.

        Raises:
            InvalidRequest, TooLong: it is not Unicode, or can't fit into the context.
        """
        return self._encode(text, add_special_tokens, "prompt")

    def decode(self, token_ids: list[int]) -> str:
        """Tokens as a text.

        Raises:
            InvalidRequest: one of them is none of the model's.
        """
        return self._tokenizer.decode(self._checked(token_ids, "tokens")) if token_ids else ""

    def token_text(self, token: int) -> str:
        """How a token looks by itself."""
        return self._tokenizer.token_bytes(token).decode(errors="replace")

    def _order(
        self,
        prefix: str,
        body: SharedFields,
        prompts: list[list[int]],
        card: ModelCard,
        asker: RequestContext,
        most_by_default: int,
        param: str,
        grammar: str,
    ) -> EngineRequest:
        order_id, n = f"{prefix}-{uuid4().hex}", body.n or 1
        salt, biases = asker.caller.salt(body.cache_salt), self._biases(body)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        several = len(prompts) * n > 1
        ttft_slo_s, tbt_slo_s = asker.slos(body.ttft_slo_s, body.tbt_slo_s)
        n_tokens = n * sum(map(len, prompts))
        if several and n_tokens > MAX_PROMPT_TOKENS:
            raise ContextLengthExceeded(
                f"{len(prompts)} prompts times n, {n}, are {n_tokens} tokens to compute, over the "
                f"{MAX_PROMPT_TOKENS} that one request may have; send several requests.",
                param="n" if n > 1 else param,
            )
        self._check_told(body, n_tokens, param)
        generations: list[GenerationRequest] = []
        for token_ids in prompts:
            stopping = self._stopping(body, len(token_ids), card, most_by_default, param)
            prompt = tuple(token_ids)
            for choice in range(n):
                generations.append(
                    GenerationRequest(
                        request_id=f"{order_id}-{len(generations)}" if several else order_id,
                        prompt_token_ids=prompt,
                        # Drawn here, once: a request that is placed again goes on with the
                        # same dice.
                        sampling=self._sampling(
                            body, (seed + choice) & _SEED_MASK, grammar, biases
                        ),
                        stopping=stopping,
                        salt=salt,
                        tenant=asker.caller.name,
                        ttft_slo_s=ttft_slo_s,
                        tbt_slo_s=tbt_slo_s,
                        priority=-(body.priority or 0),
                    )
                )
        return EngineRequest(
            id=order_id,
            generations=tuple(generations),
            n_per_prompt=n,
            stop_strings=body.stop_strings,
            shows_new=body.n_new_tokens != 0,
        )

    def _check_fits(self, body: SharedFields, n_prompt: int, param: str) -> None:
        """Check that a prompt and what is asked for fit into the context.

        Raises:
            TooLong: they don't.
        """
        card = self.card(None)
        asked = _asked(body)
        if n_prompt + (asked or 1) > card.max_context:
            raise ContextLengthExceeded(
                f"This model's context is {card.max_context} tokens; the prompt has {n_prompt}, "
                f"and {asked or 'at least 1'} more were asked for. Shorten the prompt or ask "
                "for fewer new tokens.",
                param=param,
            )

    def _check_told(self, body: SharedFields, n_tokens: int, param: str) -> None:
        """Check how much of its prompts an answer is to tell, once for each choice.

        Raises:
            TooLong: it is too much for one answer.
        """
        if body.n_prompt_top is not None and n_tokens * (1 + body.n_prompt_top) > MAX_PROMPT_SCORES:
            raise ContextLengthExceeded(
                f"Log probabilities of {n_tokens} tokens with {body.n_prompt_top} likeliest ones "
                f"each are over the {MAX_PROMPT_SCORES} that one request may have.",
                param=param,
            )
        if body.return_token_ids and n_tokens > MAX_RETURNED_TOKEN_IDS:
            raise ContextLengthExceeded(
                f"return_token_ids would tell {n_tokens} tokens of prompts, over the "
                f"{MAX_RETURNED_TOKEN_IDS} that one answer may; ask for fewer choices.",
                param="return_token_ids",
            )

    def _stopping(
        self, body: SharedFields, n_prompt: int, card: ModelCard, most_by_default: int, param: str
    ) -> Stopping:
        self._check_fits(body, n_prompt, param)
        asked = _asked(body)
        most = min(most_by_default, card.max_context - n_prompt)
        max_new_tokens = most if asked is None else asked
        if (body.min_tokens or 0) > max_new_tokens:
            raise InvalidRequest(
                f"min_tokens is {body.min_tokens}, over the {max_new_tokens} new tokens that "
                "this request has without max_tokens; send max_tokens too.",
                param="min_tokens",
            )
        eos = () if body.ignore_eos else self._tokenizer.eos_token_ids
        return Stopping(
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple(dict.fromkeys((*eos, *(body.stop_token_ids or ())))),
            min_new_tokens=body.min_tokens or 0,
        )

    def _sampling(
        self, body: SharedFields, seed: int, grammar: str, biases: tuple[tuple[int, float], ...]
    ) -> Sampling:
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
            seed=seed,
            logit_bias=biases,
            logprobs=body.n_top,
            prompt_logprobs=body.n_prompt_top,
            grammar=grammar,
        )

    def _biases(self, body: SharedFields) -> tuple[tuple[int, float], ...]:
        biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
        if biases:
            self._checked(list(biases), "logit_bias")
        return tuple(biases.items())

    def _encode_prompts(self, body: CompletionRequest) -> list[list[int]]:
        add_special_tokens = body.add_special_tokens is not False
        return [
            self._encode(prompt, add_special_tokens, "prompt")
            if isinstance(prompt, str)
            else self._checked(prompt, "prompt")
            for prompt in body.prompts
        ]

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text that may fit into the context.

        Raises:
            InvalidRequest: it is not Unicode.
            TooLong: it has more bytes than the context could hold of the longest token.
        """
        longest, most = self._tokenizer.longest_token_bytes, self.card(None).max_context
        # 4 bytes a character at the most: nearly all texts need not be counted.
        if 4 * len(text) > most * longest:
            n_bytes = len(text.encode(errors="replace"))
            if n_bytes > most * longest:
                raise ContextLengthExceeded(
                    f"The text has {n_bytes} bytes. This model's context is {most} tokens, and "
                    f"its longest token has {longest} bytes: at least "
                    f"{-(-n_bytes // longest)} tokens are too many. Shorten it.",
                    param=param,
                )
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} is not Unicode text: {error.reason}", param=param
            ) from None

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
        if (largest := max(token_ids)) >= self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"{param} has the token id {largest}; this model's are less than "
                f"{self._tokenizer.vocab_size}.",
                param=param,
            )
        return token_ids


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…")


def _asked(body: SharedFields) -> int | None:
    """New tokens asked for at the most; for none, one must be made too."""
    return None if body.n_new_tokens is None else max(body.n_new_tokens, 1)


def _is_plain(value: Any) -> bool:
    """Whether a template can't make much work of a variable's value."""
    return value is None or isinstance(value, bool | str)
