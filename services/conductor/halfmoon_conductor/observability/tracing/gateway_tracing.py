"""Trace generations, from the request to the gateway to its last token.

Names of attributes are those of OpenTelemetry's conventions for generative AI where they have one.
They contain neither prompts nor answers.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from halfmoon_conductor.engine_io.gateway_interface import (
    Gateway,
    GenerationRequest,
    ModelCard,
    TokenEvent,
)
from halfmoon_conductor.errors import ApiError
from halfmoon_conductor.observability.tracing.http_tracing import current_span
from halfmoon_conductor.observability.tracing.try_tracing import TryTracer
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.tracing import Span


class TracedGateway:
    """Trace the sampled generations of a gateway."""

    def __init__(self, gateway: Gateway, tries: TryTracer, clock: Clock) -> None:
        self._gateway = gateway
        self._tries = tries
        self._clock = clock

    @property
    def model(self) -> ModelCard | None:
        """The model served; see `Gateway.model`."""
        return self._gateway.model

    def ready(self) -> bool:
        """Return whether requests can be served; see `Gateway.ready`."""
        return self._gateway.ready()

    def missing(self) -> Sequence[str]:
        """Return the roles without a live worker; see `Gateway.missing`."""
        return self._gateway.missing()

    def missing_hint(self) -> str:
        """Return why roles are missing; see `Gateway.missing_hint`."""
        return self._gateway.missing_hint()

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield a request's tokens; see `Gateway.generate`."""
        parent = current_span.get()
        if parent is None:
            return self._gateway.generate(request)
        return self._generate(request, parent)

    async def _generate(
        self, request: GenerationRequest, parent: Span
    ) -> AsyncGenerator[TokenEvent, None]:
        began_s = self._clock.now()
        card = self._gateway.model
        model = card.name if card else ""
        operation = "text_completion" if request.request_id.startswith("cmpl-") else "chat"
        span = parent.child(
            f"{operation} {model}".rstrip(), began_s, _request_attributes(request, model)
        )
        span.set({"gen_ai.operation.name": operation})
        self._tries.open(request.request_id, span)
        n_tokens, error, over = 0, "", False
        try:
            async with aclosing(self._gateway.generate(request)) as events:
                async for event in events:
                    n_tokens += 1
                    if n_tokens == 1:
                        now = self._clock.now()
                        span.event("first token", now)
                        span.set(
                            {
                                "halfmoon.ttft_s": now - began_s,
                                "gen_ai.usage.cache_read.input_tokens": event.n_cached,
                            }
                        )
                    if event.finish:
                        over = True
                        span.set({"gen_ai.response.finish_reasons": [event.finish]})
                    yield event
        except ApiError as failure:
            error, over = failure.message, True
            span.set({"error.type": type(failure).__name__})
            raise
        finally:
            self._tries.close(request.request_id)
            if not over:  # a stop string matched, or the client is gone
                span.event("closed by the reader", self._clock.now())
            span.set({"gen_ai.usage.output_tokens": n_tokens})
            span.end(self._clock.now(), error)


def _request_attributes(request: GenerationRequest, model: str) -> dict[str, str | int | float]:
    sampling, stopping = request.sampling, request.stopping
    attributes: dict[str, str | int | float] = {
        "gen_ai.provider.name": "halfmoon",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": stopping.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "halfmoon.priority": request.priority,
    }
    if request.tenant:
        attributes["halfmoon.tenant"] = request.tenant
    return attributes
