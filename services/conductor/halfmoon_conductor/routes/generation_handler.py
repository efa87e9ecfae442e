"""Generate answers for all routes: charge the prompt, run the generation, send the response."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol

from fastapi.responses import Response
from pydantic import BaseModel

from halfmoon_conductor.api.json_writing import dump_json
from halfmoon_conductor.api.openai.openai_serializer import openai_error_event
from halfmoon_conductor.api.sse import EventStream
from halfmoon_conductor.engine_io.engine_request import EngineRequest
from halfmoon_conductor.engine_io.gateway_interface import Gateway
from halfmoon_conductor.errors import RateLimited
from halfmoon_conductor.generation.output_processor import OutputProcessor
from halfmoon_conductor.http_server.request_context import RequestContext
from halfmoon_conductor.inputs.input_processor import InputProcessor
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics
from halfmoon_conductor.resumption.resumable_streams import ResumableStreams
from halfmoon_conductor.text.tokenizer_interface import Tokenizer


class ResponseSerializer(Protocol):
    """Write an answer in one API's shapes."""

    @property
    def output(self) -> OutputProcessor:
        """The answer."""
        ...

    @property
    def is_long(self) -> bool:
        """True if the answer that `whole` returned takes long to write."""
        ...

    def whole(self) -> Coroutine[Any, Any, BaseModel]:
        """Return the whole answer once it is complete."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        ...


class GenerationHandler:
    """Start the generation of an answer for a route, and respond with it."""

    def __init__(
        self,
        gateway: Gateway,
        tokenizer: Tokenizer,
        inputs: InputProcessor,
        metrics: HttpMetrics,
        streams: ResumableStreams,
    ) -> None:
        self.inputs = inputs
        self._tokenizer = tokenizer
        self._gateway = gateway
        self._metrics = metrics
        self._streams = streams

    def generate(
        self, request: EngineRequest, context: RequestContext, received_s: float
    ) -> OutputProcessor:
        """Return the output of a request; reading it generates the answer.

        Raises:
            RateLimited: the principal has used up this minute's tokens.
        """
        try:
            context.principal.charge_prompt(request.n_prompt)
        except RateLimited:
            self._metrics.on_rejected("tenant_limit", context.principal.name)
            raise
        return OutputProcessor(
            self._gateway,
            request,
            self._tokenizer,
            self._metrics,
            context.principal.charge_generated,
            received_s=received_s,
            tags_tokens=context.resumption is not None,
            give_back=context.principal.give_back_prompt,
        )

    async def respond(
        self,
        serializer: ResponseSerializer,
        context: RequestContext,
        *,
        stream: bool,
        error_event: Callable[[Exception], bytes] = openai_error_event,
    ) -> Response:
        """Respond with a whole answer, or stream it.

        Args:
            serializer: writes the answer.
            context: of the request.
            stream: whether the client asked for server-sent events.
            error_event: writes the last event of a stream that fails midway.
        """
        if stream:
            events, resumption = serializer.events(), context.resumption
            if resumption is None:
                return EventStream(events, error_event)
            resumable = self._streams.start(
                resumption,
                context.principal,
                events,
                serializer.output.token_tag.hex,
                error_event,
            )
            return EventStream(resumable.read(resumption.last), resumable.error_event)
        whole = await serializer.whole()
        if serializer.is_long:
            content = await asyncio.to_thread(dump_json, whole)
            return Response(content, media_type="application/json")
        return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")
