"""The REST API over a scripted gateway, as tests talk to it: inside this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import httpx
import llguidance
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "Hi"}]
#: A body for each route, to which a request adds its own fields.
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "lab/moon", "prompt": "Say it"},
    CHAT: {"model": "lab/moon", "messages": HELLO},
    RESPONSES: {"model": "lab/moon", "input": "Hi"},
    MESSAGES: {"model": "lab/moon", "messages": HELLO, "max_tokens": 100},
    COUNT: {"model": "lab/moon", "messages": HELLO},
    TOKENIZE: {},
    DETOKENIZE: {},
}
#: What the model says unless a test has it say something else.
TEXT = "The moon 🌗 is half 半月 full."


def events_of(text: str) -> list[Any]:
    """Read a whole stream: objects, and ``[DONE]`` as it is. A named event's name is its type."""
    *blocks, last = text.split("\n\n")
    assert last == "", "the last event is complete"
    events: list[Any] = []
    for block in blocks:
        name, _, data = block.partition("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
        assert not name or name == f"event: {events[-1]['type']}\n"
    return events


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Read an error, which has OpenAI's shape or, below /v1/messages, Anthropic's."""
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    error: dict[str, Any] = body["error"]
    fields = {"message", "type"}
    if body.keys() == {"error"}:
        fields |= {"param", "code"}
    else:
        assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert error.keys() == fields and isinstance(error["message"], str)
    return error


async def until(condition: Callable[[], object]) -> None:
    """Wait for what other tasks do."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def client_of(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    """Return a client inside this process."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://front", **options)


class Front:
    """A client of the REST API, with what is behind it."""

    def __init__(
        self, client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: Tokenizer
    ) -> None:
        self.client, self.gateway, self.tokenizer = client, gateway, tokenizer
        self.get, self.delete = client.get, client.delete

    async def send(self, path: str, content: str | bytes, **headers: str) -> httpx.Response:
        """Send a body as it is."""
        return await self.client.post(path, content=content, headers={**JSON, **headers})

    async def post(self, path: str, fields: Any = None, **more: Any) -> httpx.Response:
        """Send the route's body with these fields, halves of surrogate pairs among them."""
        body = BODIES[path.partition("?")[0]] | (fields or {}) | more
        return await self.send(path, json.dumps(body))

    async def ask(self, path: str, fields: Any = None, **more: Any) -> Any:
        """Return the answer to such a request."""
        answer = await self.post(path, fields, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def choice(self, path: str, fields: Any = None, **more: Any) -> Any:
        """Return its only choice."""
        (choice,) = (await self.ask(path, fields, **more))["choices"]
        return choice

    async def stream(self, path: str, fields: Any = None, **more: Any) -> list[Any]:
        """Return the events of the answer as a stream."""
        answer = await self.post(path, fields, **{**more, "stream": True})
        assert answer.status_code == 200, answer.text
        return events_of(answer.text)

    async def choices(
        self, path: str, fields: Any = None, *, stream: bool, **more: Any
    ) -> list[Any]:
        """Return the only choice of an answer, or its parts in a stream."""
        if not stream:
            return [await self.choice(path, fields, **more)]
        events = await self.stream(path, fields, **more)
        assert events.pop() == "[DONE]"
        return [choice for event in events for choice in event["choices"]]

    async def error(self, path: str, status: int, fields: Any = None, **more: Any) -> Any:
        """Return the error with which such a request ends."""
        return error_of(await self.post(path, fields, **more), status)

    async def refused(self, path: str, fields: Any = None, **more: Any) -> Any:
        """Return the error with which such a request is refused before anything is computed."""
        n_requests = len(self.gateway.requests)
        error = await self.error(path, 400, fields, **more)
        assert len(self.gateway.requests) == n_requests
        return error

    async def metrics(self) -> list[str]:
        """Return the lines of /metrics."""
        return (await self.get("/metrics")).text.splitlines()

    def says(self, text: str) -> None:
        """Have the model say a text and end."""
        self.gateway.script = [*self.tokenizer.encode(text, add_special_tokens=False), 0]

    @property
    def last(self) -> GenerationRequest:
        """The last request that reached the gateway."""
        return self.gateway.requests[-1]

    @property
    def grammar(self) -> str:
        """What the last answer had to keep to."""
        return self.last.sampling.grammar

    def fits(self, text: str) -> bool:
        """Return whether the last answer might have been this text."""
        matcher = llguidance.LLMatcher(self._tokens, self.grammar, log_level=0)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.consume_tokens(list(tokens)) and matcher.is_accepting()

    @cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self.tokenizer.definition, eos_token=[0])

    def prompt(self) -> str:
        """Return the text of the last prompt, without special tokens."""
        return self.tokenizer.decode(self.last.prompt_token_ids)


@asynccontextmanager
async def open_front(
    gateway: ScriptedGateway, tokenizer: Tokenizer, **options: Any
) -> AsyncIterator[Front]:
    """Talk to a REST API with options of its own."""
    app = create_app(gateway, tokenizer, **{"registry": CollectorRegistry(), **options})
    async with client_of(app) as client:
        yield Front(client, gateway, tokenizer)
