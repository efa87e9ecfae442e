"""Turn a checked request into an engine request: prompts as token ids, grammar, seeds, limits.

What a field means by itself is checked by `api`. Here is what needs the model: its name, its
tokenizer, its chat template and its context.
"""

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.engine_io.engine_request import EngineRequest, ReasoningStart
from halfmoon_conductor.engine_io.gateway_interface import Gateway, GenerationRequest
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.errors import ContextLengthExceeded, NotSupported
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_conductor.http_server.request_context import RequestContext
from halfmoon_conductor.inputs.preparation_messages import PreparedBody
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder, prompt_names
from halfmoon_conductor.inputs.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from halfmoon_conductor.inputs.sampling_options import logit_biases_of, sampling_of, stopping_of
from halfmoon_conductor.inputs.tool_constraints import grammar_of_chat, tool_call_rules_of
from halfmoon_conductor.reasoning.reasoning_parser import reasoning_start_of, reasons
from halfmoon_conductor.text.tokenizer_interface import Tokenizer

#: New tokens of a completion that doesn't say how many, as OpenAI has it.
DEFAULT_COMPLETION_TOKENS = 16
#: Scores of prompts in one answer. The scores of a prompt travel in one message, and the event
#: loop that serves all streams reads it.
MAX_PROMPT_SCORES = 100_000
#: Tokens of all prompts of a request, times its choices, if there are several. All of them enter
#: the queue at once, ahead of later requests.
MAX_PROMPT_TOKENS = 2 << 20
#: Token ids of prompts in one answer, and characters.
MAX_RETURNED_TOKEN_IDS = 1 << 20
MAX_ECHOED_CHARACTERS = 16 << 20
#: Tokens at the end of a prompt in which a thought begins, if one does.
_N_LAST_TOKENS = 16
_SEED_MASK = 2**63 - 1


class InputProcessor:
    """Turn checked requests into engine requests.

    Args:
        gateway: names the model served.
        tokenizer: the model's.
        tool_call_parser: how the model writes calls; "auto": as its chat template shows.
        grammars: checks grammars; None: a checker is started with the first grammar.
        reasoning_parser: how the model writes thoughts; "auto": as its chat template shows.
        aliases: other names of the model, as `PromptEncoder` has them.
        defaults: of sampling fields that requests leave out.

    Raises:
        TokenizerUnavailable: the tokenizer's chat template is not valid.
    """

    def __init__(
        self,
        gateway: Gateway,
        tokenizer: Tokenizer,
        tool_call_parser: ToolCallFormat | Literal["auto"] = "auto",
        grammars: GrammarChecker | None = None,
        *,
        reasoning_parser: Literal["auto", "think", "none"] = "auto",
        aliases: Sequence[str] = (),
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.encoder = PromptEncoder(
            lambda: gateway.model, tokenizer, tool_call_parser, aliases, gateway.missing_hint
        )
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._defaults = defaults
        self._reasons = reasoning_parser == "think" or (
            reasoning_parser == "auto" and any(map(reasons, tokenizer.chat_templates.values()))
        )

    async def completion(
        self,
        body: CompletionRequest,
        context: RequestContext,
        prepared: PreparedBody | None = None,
    ) -> EngineRequest:
        """Make the engine request of a completion.

        Args:
            body: the client's request.
            context: the principal that sent it, and its latency targets.
            prepared: the prompts as a child process encoded them; None: they are token ids, and no
                echo is wanted.

        Raises:
            UnknownModel, ServiceUnavailable: as `PromptEncoder.model_card`.
            InvalidRequest: a prompt has no tokens, or ids that the model does not have.
            ContextLengthExceeded: prompt and new tokens do not fit into the context.
        """
        encoder = self.encoder
        encoder.model_card(body.model)
        prompts = encoder.encode_prompts(body) if prepared is None else prepared.prompts()
        tenant, grammar = context.principal.name, ""
        if body.has_grammar:
            grammar = await self._grammar(body.requested_grammar, tenant)
        names = prompt_names(body)
        request = self._engine_request(
            "cmpl", body, prompts, context, DEFAULT_COMPLETION_TOKENS, names, grammar
        )
        echoed = () if prepared is None else prepared.echoed_prompts
        if (n_echoed := request.n_per_prompt * sum(map(len, echoed))) > MAX_ECHOED_CHARACTERS:
            raise ContextLengthExceeded(
                f"echo would repeat {n_echoed} characters, over the {MAX_ECHOED_CHARACTERS} that "
                "one answer may; ask for fewer choices.",
                param="echo",
            )
        return msgspec.structs.replace(request, echoed_prompts=echoed) if echoed else request

    async def chat(
        self, body: ChatRequest, context: RequestContext, prepared: PreparedBody
    ) -> EngineRequest:
        """Make the engine request of a chat completion.

        Args:
            body: the client's request.
            context: the principal that sent it, and its latency targets.
            prepared: the conversation as a child process encoded it.

        Raises:
            UnknownModel, ServiceUnavailable: as `PromptEncoder.model_card`.
            ContextLengthExceeded: conversation and new tokens do not fit into the context.
        """
        self.encoder.model_card(body.model)
        rules = tool_call_rules_of(body, self.encoder.tool_call_format(body))
        (token_ids,) = prepared.prompts()
        constrained = body.has_grammar or (rules is not None and rules.place != "free")
        tenant, grammar = context.principal.name, ""
        if constrained:
            grammar = await self._grammar(lambda: grammar_of_chat(body, rules), tenant)
        n_new = self._defaults.max_new_tokens
        request = self._engine_request(
            "chatcmpl", body, [token_ids], context, n_new, ["messages"], grammar
        )
        return msgspec.structs.replace(
            request,
            tool_call_rules=rules,
            # A grammar holds from the first token on, so it leaves no room for thoughts.
            reasoning_start=None if grammar else self._reasoning_start(token_ids),
        )

    def _reasoning_start(self, token_ids: Sequence[int]) -> ReasoningStart | None:
        if not self._reasons:
            return None
        return reasoning_start_of(self._tokenizer.decode(list(token_ids[-_N_LAST_TOKENS:])))

    async def _grammar(self, build: Callable[[], RequestedGrammar | None], tenant: str) -> str:
        """Return a grammar that is known to compile; empty: any answer will do."""
        requested = await asyncio.to_thread(build)
        if requested is None:
            return ""
        if not self._tokenizer.knows_grammars:
            raise NotSupported(
                f"{requested.param} is not supported with this model, which has no texts for its "
                "tokens or no token that ends an answer.",
                param=requested.param,
            )
        if self._grammars is None:
            self._grammars = GrammarChecker.of(self._tokenizer)
        return await self._grammars.check(requested, tenant)

    def _engine_request(
        self,
        prefix: str,
        body: SharedFields,
        prompts: list[list[int]],
        context: RequestContext,
        default_new_tokens: int | None,
        params: Sequence[str],
        grammar: str,
    ) -> EngineRequest:
        n, resumption = body.n or 1, context.resumption
        several = len(prompts) * n > 1
        if resumption is None:
            answer_id = request_id = f"{prefix}-{os.urandom(16).hex()}"
            drawn_seed = secrets.randbits(63)
        else:
            _check_resumable(n, len(prompts))
            # Every conductor writes the same answer, while workers see requests of their own.
            answer_id = f"{prefix}-{resumption.answer_id}"
            request_id = f"{answer_id}-{os.urandom(4).hex()}"
            drawn_seed = resumption.seed
        salt = context.principal.salt(body.cache_salt)
        if biases := logit_biases_of(body):
            self.encoder.check_token_ids([token for token, _ in biases], "logit_bias")
        if body.stop_token_ids:
            self.encoder.check_token_ids(body.stop_token_ids, "stop_token_ids")
        seed = drawn_seed if body.seed is None else body.seed
        ttft_slo_s, tbt_slo_s = context.slos(body.ttft_slo_s, body.tbt_slo_s)
        _check_prompt_tokens(body, prompts, params[0].partition("[")[0])
        card = self.encoder.model_card(None)
        generations: list[GenerationRequest] = []
        for token_ids, param in zip(prompts, params, strict=True):
            self.encoder.check_context(body, len(token_ids), param)
            room = card.open_end(len(token_ids))
            stopping = stopping_of(
                body,
                max_new_tokens=min(default_new_tokens or room, room),
                eos_token_ids=self._tokenizer.eos_token_ids,
            )
            prompt = tuple(token_ids)
            for choice in range(n):
                # The seed is drawn here, once: a retried request goes on with the same draws.
                sampling = sampling_of(
                    body,
                    self._defaults,
                    seed=(seed + choice) & _SEED_MASK,
                    grammar=grammar,
                    biases=biases,
                )
                generations.append(
                    GenerationRequest(
                        request_id=f"{request_id}-{len(generations)}" if several else request_id,
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        stopping=stopping,
                        open_end=body.n_generated_tokens is None,
                        salt=salt,
                        tenant=context.principal.name,
                        ttft_slo_s=ttft_slo_s,
                        tbt_slo_s=tbt_slo_s,
                        priority=-(body.priority or 0),
                    )
                )
        return EngineRequest(
            id=answer_id,
            generations=tuple(generations),
            n_per_prompt=n,
            fingerprint=card.fingerprint,
            stop_strings=body.stop_strings,
            returns_new_tokens=body.n_new_tokens != 0,
        )


def _check_resumable(n: int, n_prompts: int) -> None:
    """Check that a stream's events have one order.

    Raises:
        NotSupported: it has several choices, whose events come as they are computed.
    """
    if n * n_prompts > 1:
        raise NotSupported(
            f"A stream with Idempotency-Key has one choice, and this one would have "
            f"{n * n_prompts}; send one request for each, or no Idempotency-Key.",
            param="n" if n > 1 else "prompt",
        )


def _check_prompt_tokens(body: SharedFields, prompts: list[list[int]], param: str) -> None:
    """Check how many prompt tokens a request computes and returns, once for each choice.

    Raises:
        ContextLengthExceeded: they are too many for one request or for one answer.
    """
    n = body.n or 1
    n_tokens = n * sum(map(len, prompts))
    if len(prompts) * n > 1 and n_tokens > MAX_PROMPT_TOKENS:
        raise ContextLengthExceeded(
            f"{len(prompts)} prompts times n, {n}, are {n_tokens} tokens to compute, over the "
            f"{MAX_PROMPT_TOKENS} that one request may have; send several requests.",
            param="n" if n > 1 else param,
        )
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
