"""What all routes that generate share: from a request's order to its answer, streamed or whole."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol

from fastapi.responses import Response
from pydantic import BaseModel

from halfmoon_conductor import error_responses
from halfmoon_conductor.answering import Answer
from halfmoon_conductor.asking import Asker
from halfmoon_conductor.errors import RateLimited
from halfmoon_conductor.generation import Gateway
from halfmoon_conductor.http_metrics import HttpMetrics
from halfmoon_conductor.intake import Intake, Order
from halfmoon_conductor.long_answers import json_of
from halfmoon_conductor.sse import EventStream
from halfmoon_conductor.tokenizer import Tokenizer


class Written(Protocol):
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


class Front:
    """Between the routes and the gateway."""

    def __init__(
        self, gateway: Gateway, tokenizer: Tokenizer, intake: Intake, metrics: HttpMetrics
    ) -> None:
        self.intake = intake
        self.tokenizer = tokenizer
        self._gateway = gateway
        self._metrics = metrics

    def answer(self, order: Order, asker: Asker, began_s: float) -> Answer:
        """The answer to an order, still to be read.

        Raises:
            RateLimited: this minute's tokens of the asker are used up.
        """
        try:
            asker.caller.admit(order.n_prompt)
        except RateLimited:
            self._metrics.turned_away("tenant_limit")
            raise
        return Answer(
            self._gateway,
            order,
            self.tokenizer,
            self._metrics,
            asker.caller.spend,
            began_s=began_s,
        )


async def respond(
    written: Written,
    *,
    stream: bool,
    last_words: Callable[[Exception], bytes] = error_responses.error_event,
) -> Response:
    """Send an answer as the client wants it."""
    if stream:
        return EventStream(written.events(), last_words)
    whole = await written.whole()
    if written.is_long:
        content = await asyncio.to_thread(json_of, whole)
        return Response(content, media_type="application/json")
    return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")
