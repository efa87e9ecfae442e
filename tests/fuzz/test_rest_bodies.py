"""Hostile HTTP requests to each route of docs/api.md: a named 4xx or a right answer, never a 5xx.

Bodies are made of the page's own examples, combined, mutated, cut and badly encoded; so are
headers, methods and paths. They reach a conductor with real workers over real sockets, several at
once. A victim beside gets its exact tokens, and in the end nothing is left: no task, no page, no
lease, no connection. `make fuzz N=20000 FUZZERS=tests/fuzz/test_rest_bodies.py` tries many.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.inputs.body_preparation import PreparationSpec
from halfmoon_conductor.inputs.body_preparers import MEMORY_BYTES, ProcessPreparer
from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.page.cluster_view import ConductorInfo
from halfmoon_conductor.page.debug_routes import debug_app
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.stored_responses.response_store import ResponseStore, StoredResponse
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from halfmoon_metadata.stores.memory_values import MemoryValues
from halfmoon_sandbox import Sandbox
from halfmoon_testing.conductor_http import serve_app
from halfmoon_testing.fuzz_inputs import cut_anywhere, mutate_bytes, mutate_value, n_fuzz_inputs
from halfmoon_testing.models.byte_tokenizer import train_tokenizer, write_tokenizer
from tests.conductor.api_page import page_cases
from tests.fuzz.conftest import noted
from tests.nightly import by_day
from tests.services.conftest import open_cluster

N = n_fuzz_inputs(by_day(90, at_night=2000))
N_AT_ONCE = 6
#: No answer may take longer.
MAX_S = 60.0
MAX_CONTEXT = 200
MODEL = "m"
#: The gaps in ids of a tokenizer with fewer tokens than the engine are not what is tested here.
N_VOCAB = 259
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"model": MODEL, "prompt": "Say it", "max_tokens": 5}),
    "chat": ("/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 5}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 5}),
    "messages": ("/v1/messages", {"model": MODEL, "messages": HELLO, "max_tokens": 5}),
    "count_tokens": ("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO}),
    "tokenize": ("/tokenize", {"messages": HELLO}),
    "detokenize": ("/detokenize", {"tokens": [70]}),
    "roles": ("/debug/roles/prefill-9", {"role": "decode"}),
}
GETS = (
    *("/", "/page/page.js", "/health", "/ready", "/ping", "/version", "/load", "/metrics"),
    *("/v1/models", f"/v1/models/{MODEL}", "/openapi.json", "/debug/cluster", "/debug/decisions"),
    *("/debug/activity", "/debug/decisions?request_id=a", "/v1/responses/resp_1"),
    *("/debug/latencies", "/debug/roles", "/debug/prometheus-targets"),
    *("/debug/decisions?last=3", "/debug/latencies?after_s=1"),
)
TYPES = (
    *("application/json", "application/json; charset=utf-8", "application/json;charset=utf-16"),
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""),
)
NUMBERS = ("1", "0.001", "1e308", "nan", "inf", "-1", "", "1_0", "٣", "0x10", "1" * 400, "1, 2")


#: Examples of all fields from the page, by route.
EXAMPLES: dict[str, list[dict[str, Any]]] = {name: [] for name in BODIES}
for case in page_cases():
    if case.mark != "refused":
        EXAMPLES[case.route].append(case.example)
assert sum(map(len, EXAMPLES.values())) > 150


class HostileRequest(NamedTuple):
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    #: Whether it is sent in chunks of any sizes instead of with a length.
    chunked: bool


class Requests:
    """Generates hostile requests."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice

    def draw(self) -> HostileRequest:
        dice = self.dice
        if dice.random() < 0.12:
            method = dice.choice(("GET", "GET", "GET", "HEAD", "POST", "OPTIONS", "DELETE", "PUT"))
            return HostileRequest(method, self.path(dice.choice(GETS)), self.headers(), b"", False)
        path, body = self.body()
        method = "POST" if dice.random() < 0.98 else dice.choice(("GET", "PUT", "PATCH"))
        path = self.path(path) if dice.random() < 0.03 else path
        content = self.encode(body)
        return HostileRequest(method, path, self.headers(), content, dice.random() < 0.1)

    def body(self) -> tuple[str, Any]:
        dice = self.dice
        route = dice.choice((*list(BODIES), "chat", "completions", "responses", "messages"))
        path, base = BODIES[route]
        body: Any = dict(base)
        for _ in range(dice.choice((0, 1, 1, 2, 4))):
            if EXAMPLES[route]:
                body |= dice.choice(EXAMPLES[route])
        body |= {"model": MODEL} if route != "roles" and dice.random() < 0.9 else {}
        for _ in range(dice.choice((0, 0, 0, 1, 1, 1, 2))):
            body = mutate_value(dice, body)
        if route == "roles" and dice.random() < 0.5:
            names = ("%00", "ü", "a/b", "x" * 3000, "prefill-9?role=decode", "%ff")
            path = f"/debug/roles/{dice.choice(names)}"
        return path, body

    def encode(self, body: Any) -> bytes:
        dice = self.dice
        try:
            text = json.dumps(body, ensure_ascii=dice.random() < 0.5)
        except RecursionError:
            return b'{"a":' * 5_000
        content = text.encode("utf-8", "surrogatepass")
        match dice.random():
            case x if x < 0.08:
                return mutate_bytes(dice, content)
            case x if x < 0.11:
                return cut_anywhere(dice, content)
            case x if x < 0.14:
                encoding = dice.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7"))
                return text.encode(encoding, "surrogatepass" if "7" not in encoding else "replace")
            case x if x < 0.16:
                return b"{" + b"".join(b'"model":"m",' for _ in range(3)) + content[1:]
            case x if x < 0.21:
                # Long enough for a helper process.
                return content[:-1] + b" " * dice.choice((10_000, 20_000, 60_000)) + content[-1:]
            case x if x < 0.23:
                return dice.choice((b"", b"null", b"[]", b'"x"', b"1", b"\0", content * 2, b"{}"))
        return content

    def headers(self) -> list[tuple[str, str]]:
        dice = self.dice
        kind = TYPES[0] if dice.random() < 0.95 else dice.choice(TYPES)
        headers = [("content-type", kind)] if kind else []
        if dice.random() < 0.08:
            name = dice.choice(("x-ttft-slo-s", "x-tbt-slo-s"))
            headers.append((name, dice.choice(NUMBERS)))
        if dice.random() < 0.05:
            headers.append(("x-request-id", dice.choice(("mine", "x" * 500, "\x7f", "", "a b"))))
        if dice.random() < 0.04:
            odd = ("gzip", "identity", "br, gzip", "x" * 9000, "\x80\xff")
            names = ("content-encoding", "accept", "accept-encoding", "cookie", "authorization")
            headers.append((dice.choice(names), dice.choice(odd)))
        if dice.random() < 0.02:
            headers += [(f"x-a-{i}", "b") for i in range(dice.choice((10, 127, 200)))]
        return headers

    def path(self, path: str) -> str:
        dice = self.dice
        if dice.random() < 0.4:
            return path
        tails = ("/", "//", "/..", "/../..", "%00", "%ff", "?", "?a=1", "?last=", "#x", "%2e%2e/x")
        more = ("?last=-1", "?last=9" + "9" * 17, "?after_s=٣", "?last=1.5&last=2", "?last=nan")
        return dice.choice((path + dice.choice((*tails, *more)), path[:-1], path * 2, path.upper()))


class Conductor(NamedTuple):
    cluster: Any
    address: tuple[str, int]
    tokenizer: Tokenizer
    oracle: FakeEngine


@asynccontextmanager
async def open_conductor(tokenizer: Tokenizer) -> AsyncIterator[Conductor]:
    spec = parse_fake_spec(f"fake://m?vocab={N_VOCAB}&max_context={MAX_CONTEXT}&eos=1")

    def engine() -> FakeEngine:
        return FakeEngine(spec)

    async with open_cluster(engine, n_pages=2_000) as cluster:
        observer = CoreObserver(cluster.core, LatencyHistory())
        cluster.shell.add_recorder(observer.record)
        info = ConductorInfo("conductor-0", "memory")
        grammars = GrammarChecker.of(tokenizer)
        spec_of_bodies = msgspec.msgpack.encode(PreparationSpec(tokenizer.source, "auto"))
        sandbox = Sandbox(
            "halfmoon_conductor.inputs.body_preparation:make_handler",
            spec_of_bodies,
            memory_bytes=MEMORY_BYTES,
        )
        preparer = ProcessPreparer(sandbox, 2)
        preparer.start()
        responses = ResponseStore(MemoryValues(ttl_s=60, max_bytes=2**20), 60)
        items = msgspec.Raw(b'[{"role":"user","content":"Hi"}]')
        stored = StoredResponse(msgspec.Raw(b"{}"), items)
        assert await responses.save("", "resp_1", stored)
        app = create_app(
            cluster.gateway,
            tokenizer,
            responses=responses,
            registry=CollectorRegistry(),
            latencies=observer.latencies,
            extra_mounts=[("/debug", debug_app(observer, cluster.hub, cluster.clock, info))],
            preparer=preparer,
            grammars=grammars,
        )
        try:
            async with serve_app(app) as address:
                yield Conductor(cluster, address, tokenizer, engine())
        finally:
            responses.close()
            grammars.close()
            preparer.close()


async def ask(conductor: Conductor, request: HostileRequest, dice: Random) -> httpx.Response:
    """Send one request over a connection of its own, byte for byte as it is."""
    reader, writer = await asyncio.open_connection(*conductor.address)
    lines = [f"{request.method} {request.path} HTTP/1.1", "host: front", "connection: close"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    body = request.body
    if request.chunked:
        lines.append("transfer-encoding: chunked")
        chunks = []
        while body:
            n = dice.choice((1, 7, 100, 5000))
            chunks.append(b"%x\r\n%s\r\n" % (len(body[:n]), body[:n]))
            body = body[n:]
        body = b"".join(chunks) + b"0\r\n\r\n"
    else:
        lines.append(f"content-length: {len(body)}")
    try:
        writer.write("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body)
        async with asyncio.timeout(MAX_S):
            answer = await reader.read()
    finally:
        writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    status, *fields = head.split(b"\r\n")
    pairs = [tuple(field.split(b": ", 1)) for field in fields]
    found: Any = [(name.lower(), value) for name, value in pairs]
    raw = dict(found)
    if raw.get(b"transfer-encoding") == b"chunked":
        content = b"".join(_chunks(content))
        found = [pair for pair in found if pair[0] != b"transfer-encoding"]
    return httpx.Response(int(status.split()[1]), headers=found, content=content)


def _chunks(content: bytes) -> list[bytes]:
    parts = []
    while content:
        size, _, content = content.partition(b"\r\n")
        n = int(size, 16)
        parts.append(content[:n])
        content = content[n + 2 :]
        if n == 0:
            return parts
    raise AssertionError("a chunked answer without an end")


def check(request: HostileRequest, answer: httpx.Response) -> str:
    """Assert that an answer is a named refusal or a whole success; return its kind."""
    status = answer.status_code
    assert status < 500, (status, answer.text[:500])
    if request.method == "HEAD" or status in (204, 304):
        return str(status)
    kind = answer.headers.get("content-type", "")
    if status >= 400:
        assert kind.startswith("application/json"), (status, kind, answer.text[:200])
        error = answer.json()["error"]
        assert error["message"] and error["type"], answer.text
        assert len(answer.content) < 20_000, "an error that is as long as the request"
        # JSON keeps control characters apart; a lone surrogate could not be written.
        answer.content.decode()
        return f"{status}"
    if kind.startswith("text/event-stream"):
        return _check_stream(answer.content.decode())
    if kind.startswith("application/json"):
        body = answer.json()
        for choice in body.get("choices", []) if isinstance(body, dict) else []:
            assert choice["finish_reason"] in ("stop", "length", "tool_calls"), choice
    return f"{status}"


def _check_stream(text: str) -> str:
    *blocks, last = text.split("\n\n")
    assert last == "", "the last event is whole"
    data = [line[6:] for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    errors = [each["error"] for each in events if isinstance(each, dict) and each.get("error")]
    # What is found out in the middle of an answer is the request's own fault: its grammar.
    for error in errors:
        assert error["type"] in ("invalid_request_error",), error
    ends = ("message_stop", "response.completed", "response.incomplete", "response.failed")
    done = data[-1] == "[DONE]" or events[-1].get("type") in ends
    assert done or errors, text[-500:]
    return "stream with an error" if errors else "stream"


async def haunt(tokenizer: Tokenizer, dice: Random, caplog: pytest.LogCaptureFixture) -> None:
    requests, ends = Requests(dice), Counter[str]()
    caplog.set_level(logging.WARNING)
    began_s = time.monotonic()
    slowest = (0.0, "")
    async with open_conductor(tokenizer) as conductor:
        victim = Victim(conductor)
        await victim.ask()
        n_tasks = len(asyncio.all_tasks())

        async def one(number: int, request: HostileRequest) -> None:
            nonlocal slowest
            asked_s = time.monotonic()
            with noted(lambda: f"input {number}: {request._replace(body=request.body[:3000])}"):
                answer = await ask(conductor, request, Random(number))
                ends[check(request, answer)] += 1
            slowest = max(slowest, (time.monotonic() - asked_s, f"{number}: {request.path}"))

        with capture_logs() as logs:
            for start in range(0, N, N_AT_ONCE):
                drawn = [requests.draw() for _ in range(min(N_AT_ONCE, N - start))]
                async with asyncio.TaskGroup() as group:
                    group.create_task(victim.ask())
                    for i, request in enumerate(drawn):
                        group.create_task(one(start + i, request))
                for line in logs:
                    assert line["log_level"] not in ("error", "critical"), line
                logs.clear()
                for record in caplog.records:
                    assert record.levelno < logging.ERROR, record.getMessage()
                caplog.clear()
        await conductor.cluster.settled()
        await conductor.cluster.until(lambda: len(asyncio.all_tasks()) <= n_tasks)
        load = await ask(conductor, HostileRequest("GET", "/load", [], b"", False), dice)
        assert load.json()["server_load"] == 0
        await victim.ask()
    print(
        f"{N} requests in {time.monotonic() - began_s:.1f} s: {dict(sorted(ends.items()))}; "
        f"slowest {slowest[0]:.2f} s ({slowest[1]}); {victim.n_asked} answers to the victim"
    )
    # Few bodies are right and ask for a stream.
    assert ends["200"] and ends["400"] and (ends["stream"] or N < 3000)


class Victim:
    """Asks for answers that are known."""

    PROMPT = tuple((i * 7) % N_VOCAB for i in range(70))

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self.expected = conductor.oracle.expected(self.PROMPT, 12)
        if 1 in self.expected:
            self.expected = self.expected[: self.expected.index(1) + 1]
        self.n_asked = 0

    async def ask(self) -> None:
        fields = {"prompt": self.PROMPT, "temperature": 0, "return_token_ids": True}
        body = {"model": MODEL, "max_tokens": 12, **fields}
        headers = [("content-type", "application/json")]
        request = HostileRequest(
            "POST", "/v1/completions", headers, json.dumps(body).encode(), False
        )
        answer = await ask(self.conductor, request, Random(0))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == self.expected
        self.n_asked += 1


@pytest.mark.timeout(14_400)
async def test_no_request_to_a_fake_model_is_a_fault_of_ours(
    dice: Random, caplog: pytest.LogCaptureFixture
) -> None:
    await haunt(FakeTokenizer(N_VOCAB, (1,)), dice, caplog)


@pytest.mark.timeout(14_400)
async def test_no_request_to_a_model_with_texts_and_tools_is_a_fault_of_ours(
    tmp_path: Path, dice: Random, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(train_tokenizer([], N_VOCAB), tmp_path, max_context=MAX_CONTEXT)
    await haunt(HubTokenizer(tmp_path), dice, caplog)
