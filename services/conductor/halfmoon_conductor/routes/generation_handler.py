"""What all routes that generate share: from a request's order to its answer, streamed or whole."""

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
from halfmoon_conductor.text.tokenizer_interface import Tokenizer


class ResponseSerializer(Protocol):
    """An answer in one API's shapes."""

    @property
    def is_long(self) -> bool:
        """Whether what `whole` gave is long to write."""
        ...

    def whole(self) -> Coroutine[Any, Any, BaseModel]:
        """All of it, once it is complete."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        ...


class GenerationHandler:
    """Between the routes and the gateway."""

    def __init__(
        self, gateway: Gateway, tokenizer: Tokenizer, intake: InputProcessor, metrics: HttpMetrics
    ) -> None:
        self.intake = intake
        self.tokenizer = tokenizer
        self._gateway = gateway
        self._metrics = metrics

    def answer(
        self, order: EngineRequest, asker: RequestContext, began_s: float
    ) -> OutputProcessor:
        """The answer to an order, still to be read.

        Raises:
            RateLimited: this minute's tokens of the asker are used up.
        """
        try:
            asker.caller.admit(order.n_prompt)
        except RateLimited:
            self._metrics.on_rejected("tenant_limit")
            raise
        return OutputProcessor(
            self._gateway,
            order,
            self.tokenizer,
            self._metrics,
            asker.caller.charge_generated,
            began_s=began_s,
        )


async def send_response(
    written: ResponseSerializer,
    *,
    stream: bool,
    last_words: Callable[[Exception], bytes] = openai_error_event,
) -> Response:
    """Send an answer as the client wants it."""
    if stream:
        return EventStream(written.events(), last_words)
    whole = await written.whole()
    if written.is_long:
        content = await asyncio.to_thread(dump_json, whole)
        return Response(content, media_type="application/json")
    return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")
