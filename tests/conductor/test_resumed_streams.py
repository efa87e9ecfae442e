"""Streams that clients come back to: with their key and the last event that they have."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import GenerationFailed
from halfmoon_conductor.resumption.event_log import EventLog
from halfmoon_conductor.resumption.resumable_streams import ResumableStreams
from halfmoon_conductor.resumption.resumption_limits import (
    ResumptionLimits,
    StreamPhase,
    choose_victim,
)
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.tenants import Tenants, add_tenant
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway, serve_app
from tests.conductor.fronts import (
    BODIES,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TEXT,
    error_of,
    until,
)  # fmt: skip
from tests.conductor.tool_requests import a_call, function, with_tools
from tests.nightly import by_day

DEADLINE_S = 20
PATHS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
MORE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"max_tokens": 100},
    CHAT: {"stream_options": {"include_usage": True}, "logprobs": True},
}


CALL_ID = re.compile(r"(?:call|toolu)_[0-9a-f]{32}")
_TIME = re.compile(r'"created(?:_at)?": ?\d+')


Open = Callable[..., Any]


class Event(NamedTuple):
    id: str
    data: str

    @property
    def number(self) -> int:
        return int(self.id.partition("-")[0])

    @property
    def text(self) -> str:
        """Of a completion."""
        return "" if self.data == "[DONE]" else str(json.loads(self.data)["choices"][0]["text"])


def parse(text: str) -> list[Event]:
    """Read whole events; one that was cut off is none."""
    events: list[Event] = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append(Event(fields.get("id", ""), fields["data"]))
    return events


def text_of(events: Sequence[Event]) -> str:
    return "".join(each.text for each in events)


def timeless(events: Sequence[Event]) -> list[str]:
    """Events without the moment at which their answer was begun."""
    return [_TIME.sub("", str(each)) for each in events]


def some_of(events: Sequence[Event]) -> list[Event]:
    """Each event at night; by day the first and the last ones, and each fourth."""
    middle = events[2:-2]
    return [*events[:2], *middle[:: by_day(4, at_night=1)], *events[-2:]]


class Client:
    """A client of one conductor that reads streams."""

    def __init__(self, address: tuple[str, int], key: str) -> None:
        host, port = address
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=DEADLINE_S)

    def _request(
        self, path: str, key: str | None, last: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        headers = dict(self._headers)
        if key is not None:
            headers["idempotency-key"] = key
        if last:
            headers["last-event-id"] = last
        asked = {**BODIES[path], **MORE.get(path, {}), "stream": True, **body}
        return {"url": path, "json": asked, "headers": headers}

    async def post(
        self, path: str = COMPLETIONS, key: str | None = "k", last: str = "", **body: Any
    ) -> httpx.Response:
        return await self.http.post(**self._request(path, key, last, body))

    async def error(self, status: int, **request: Any) -> dict[str, Any]:
        return error_of(await self.post(**request), status)

    async def whole(
        self, path: str = COMPLETIONS, key: str | None = "k", last: str = "", **body: Any
    ) -> list[Event]:
        answer = await self.post(path, key, last, **body)
        assert answer.status_code == 200, answer.text
        return parse(answer.text)

    @asynccontextmanager
    async def opened(
        self, n: int, path: str = COMPLETIONS, key: str | None = "k", last: str = "", **body: Any
    ) -> AsyncIterator[tuple[list[Event], AsyncIterator[str]]]:
        """Read `n` events at least; the connection breaks at the end."""
        request = self._request(path, key, last, body)
        async with self.http.stream("POST", **request) as answer:
            assert answer.status_code == 200
            text, more = "", answer.aiter_text()
            while len(parse(text)) < n:
                text += await anext(more)
            yield parse(text), more

    async def broken(self, n: int, **request: Any) -> list[Event]:
        async with self.opened(n, **request) as (events, _):
            return events


@pytest.fixture
def connect(tokenizer: HubTokenizer, gateway: ScriptedGateway) -> Open:
    """``async with connect(window_s=9) as (client, streams)``: a conductor of its own."""

    @asynccontextmanager
    async def run(
        window_s: float = 60.0,
        *,
        keys: Sequence[str] = ("",),
        tenants: Tenants | None = None,
        gateway: ScriptedGateway = gateway,
        **limits: int,
    ) -> AsyncIterator[Any]:
        streams = ResumableStreams(ResumptionLimits(window_s=window_s, **limits))
        app = create_app(
            gateway, tokenizer, registry=CollectorRegistry(), tenants=tenants, streams=streams
        )
        async with serve_app(app) as address:
            clients = [Client(address, key) for key in keys]
            yield *clients, streams
            streams.check()
            for client in clients:
                await client.http.aclose()
            await streams.close()
        assert not gateway.live, "nothing is generated for ever"

    return run


async def test_a_broken_stream_goes_on_and_its_rest_is_handed_out_once(
    connect: Open, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 5
    async with connect() as (client, streams):
        first = await client.broken(3)
        await until(lambda: streams.n_kept and not gateway.cancelled)
        gateway.resume.set()
        # It goes on without a client.
        await until(lambda: not gateway.live)
        rest = await client.whole(last=first[-1].id)
        assert text_of(first + rest) == TEXT
        assert [each.number for each in first + rest] == list(range(1, len(first + rest) + 1))
        assert rest[-1].data == "[DONE]"
        assert len(gateway.requests) == 1


async def test_a_client_that_comes_back_in_mid_generation_reads_the_rest_live(
    connect: Open, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 5
    async with connect() as (client, _):
        first = await client.broken(4)
        async with client.opened(1, last=first[1].id) as (again, _):
            assert again == first[2:3] + again[1:]
            assert gateway.live
        gateway.resume.set()
        rest = await client.whole(last=again[-1].id)
        assert text_of([*first[:2], *again, *rest]) == TEXT
        metrics = (await client.http.get("/metrics")).text
        assert 'halfmoon_resumed_streams_total{source="kept"} 2.0' in metrics
        assert len(gateway.requests) == 1


async def test_without_a_key_events_have_no_ids_and_end_with_their_client(
    connect: Open, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 5
    async with connect() as (client, streams):
        events = await client.broken(3, key=None)
        assert {each.id for each in events} == {""}
        await until(lambda: gateway.cancelled)
        assert not streams.n_kept


async def test_a_stream_whose_client_stays_away_ends_after_the_window(
    connect: Open, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 5
    async with connect(window_s=0.05) as (client, streams):
        first = await client.broken(3)
        await until(lambda: gateway.cancelled)
        assert not streams.n_kept
        gateway.resume.set()
        # Another computation of the same answer.
        rest = await client.whole(last=first[-1].id)
        assert text_of(first + rest) == TEXT
        earlier, later = gateway.requests
        assert earlier.request_id != later.request_id, "workers may still have the first"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window_s", [0, 60], ids=["computed", "kept"])
async def test_after_any_event_the_rest_is_what_the_whole_stream_had(
    connect: Open, path: str, window_s: float
) -> None:
    async with connect(window_s) as (client, _):
        whole = await client.whole(path)
        assert len(whole) > 10
        for each in some_of(whole):
            rest = await client.whole(path, last=each.id)
            assert timeless(rest) == timeless(whole[each.number :])


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.usefixtures("room")
async def test_calls_of_tools_have_the_same_ids_in_a_stream_that_is_computed_again(
    connect: Open, gateway: ScriptedGateway, tokenizer: HubTokenizer, path: str
) -> None:
    call, tools = a_call("tide", "{}"), with_tools(path, function("tide"))
    gateway.script = [*tokenizer.encode(f"See:\n{call}\n{call}", add_special_tokens=False), 0]
    async with connect(0) as (client, _):
        whole = await client.whole(path, **tools)
        assert len(set(CALL_ID.findall(str(whole)))) >= 2
        for each in some_of(whole):
            rest = await client.whole(path, last=each.id, **tools)
            assert timeless(rest) == timeless(whole[each.number :])


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("window_s", [0, 60], ids=["computed", "kept"])
async def test_a_long_body_that_a_child_reads_is_gone_on_with_too(
    connect: Open, window_s: float
) -> None:
    async with connect(window_s) as (client, _):
        body = {"prompt": [5 + number % 90 for number in range(100_000)]}
        whole = await client.whole(**body)
        rest = await client.whole(last=whole[4].id, **body)
        assert text_of(whole[:5] + rest) == TEXT
        body["prompt"][50_000] += 1
        await client.error(422, last=whole[4].id, **body)


async def test_another_conductor_draws_the_same_tokens_where_the_client_gave_no_seed(
    connect: Open, gateway: ScriptedGateway
) -> None:
    async def seed(key: str | None, tenants: Tenants | None = None, **body: Any) -> int:
        async with connect(0) as (client, _):
            await client.whole(key=key, **body)
        return gateway.requests.pop().sampling.seed

    assert await seed("one") == await seed("one")
    assert len({await seed("one"), await seed("two"), await seed(None), await seed(None)}) == 4
    assert await seed("one", seed=7) == 7


async def test_an_answer_that_comes_out_otherwise_is_not_spliced(
    connect: Open, gateway: ScriptedGateway
) -> None:
    async with connect(0) as (client, _):
        whole = await client.whole()
        gateway.script = [*gateway.script[:3], 70, *gateway.script[4:]]
        assert (await client.error(409, last=whole[5].id))["code"] == "resumption_mismatch"
        assert text_of(await client.whole(last=whole[1].id)) != text_of(whole[2:])


async def test_an_event_that_never_was_is_refused(connect: Open, gateway: ScriptedGateway) -> None:
    async with connect() as (client, _):
        whole = await client.whole()
        _, *tags = whole[-1].id.split("-")
        error = await client.error(409, last="-".join(["999999999", *tags]))
        assert "event 999999999" in error["message"]
        await client.error(409, last="-".join(["1", *tags]))


@pytest.mark.parametrize("window_s", [0, 60], ids=["computed", "kept"])
async def test_a_key_with_another_body_or_route_is_refused_before_any_work(
    connect: Open, gateway: ScriptedGateway, window_s: float
) -> None:
    async with connect(window_s) as (client, _):
        last = (await client.whole())[1].id
        for other in ({"prompt": "Say more"}, {"path": CHAT}):
            error = await client.error(422, last=last, **other)
            assert error["code"] == "idempotency_key_reused"
            assert error["param"] == "idempotency-key"
        assert len(gateway.requests) == 1
        if window_s:
            await client.error(422, prompt="Say more")


async def test_a_later_connection_takes_the_stream_over(
    connect: Open, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 5
    async with connect() as (client, _):
        async with client.opened(3) as (first, earlier):
            second = asyncio.create_task(client.whole(last=first[0].id))
            ending = parse("".join([text async for text in earlier]))
            assert json.loads(ending[-1].data)["error"]["code"] == "stream_taken_over"
            assert ending[-1].id == ""
        gateway.resume.set()
        assert text_of(first[:1] + await second) == TEXT
        assert len(gateway.requests) == 1


async def test_another_tenants_key_leads_nowhere(
    connect: Open, gateway: ScriptedGateway, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    keys = [add_tenant(file, name) for name in ("mine", "theirs")]
    async with connect(keys=keys, tenants=Tenants.read(file)) as (mine, theirs, streams):
        first = await mine.whole()
        other = await theirs.whole()
        assert streams.n_kept == 2
        assert len(gateway.requests) == 2
        seeds = {each.sampling.seed for each in gateway.requests}
        assert len(seeds) == 2, "a seed tells nothing of another tenant's answer"
        assert not {each.id for each in first} & {each.id for each in other}
        await theirs.error(422, last=first[2].id)


KEYS = ("", "k" * 256, "k" * 30_000, "two words", "clé".encode())
LAST = (
    "",
    "1",
    "0-000000000000-000000000000",
    "-1-000000000000-000000000000",
    "1e3-000000000000-000000000000",
    "9999999999-000000000000-000000000000",
    "1-000000000000-00000000000g",
    "1-000000000000-000000000000-",
    "9" * 5000,
)
HOSTILE: list[tuple[list[Any], str]] = [
    *[([("idempotency-key", key)], "idempotency-key") for key in KEYS],
    ([("idempotency-key", "a"), ("idempotency-key", "b")], "idempotency-key"),
    ([("last-event-id", "1-000000000000-000000000000")], "last-event-id"),
    *[([("idempotency-key", "k"), ("last-event-id", last)], "last-event-id") for last in LAST],
]


async def test_odd_and_repeated_headers_are_refused_by_name(
    connect: Open, gateway: ScriptedGateway
) -> None:
    async with connect() as (client, _):
        for headers, param in HOSTILE:
            body = {**BODIES[COMPLETIONS], "stream": True}
            answer = await client.http.post(COMPLETIONS, json=body, headers=headers)
            assert error_of(answer, 400)["param"] == param, headers
            assert len(answer.content) < 1000
        assert not gateway.requests


async def test_whole_answers_take_a_key_and_keep_nothing(
    connect: Open, gateway: ScriptedGateway
) -> None:
    async with connect() as (client, streams):
        answer = await client.post(stream=False)
        assert answer.json()["choices"][0]["text"] == TEXT
        assert not streams.n_kept
        answer = await client.post(stream=False, last="1-000000000000-000000000000")
        assert answer.status_code in (400, 422)


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"]}], ids=["n", "prompts"])
async def test_several_choices_have_no_one_order_and_are_refused(
    connect: Open, gateway: ScriptedGateway, body: dict[str, Any]
) -> None:
    async with connect() as (client, _):
        error = await client.error(400, **body)
        assert (error["code"], error["param"]) == ("not_supported", next(iter(body)))
        assert not gateway.requests


async def test_a_stream_that_failed_is_tried_again_after_its_last_event(
    connect: Open, gateway: ScriptedGateway
) -> None:
    gateway.failure, gateway.n_before_failure = GenerationFailed("no worker is left"), 6
    async with connect() as (client, streams):
        events = await client.whole()
        assert json.loads(events[-1].data)["error"]["code"] == "generation_failed"
        assert events[-1].id == ""
        assert not streams.n_kept
        gateway.failure = None
        rest = await client.whole(last=events[-2].id)
        assert text_of(events[:-1] + rest) == TEXT
        # Before the first event a failure keeps its status.
        gateway.refusal = GenerationFailed("nothing works")
        await client.error(500, key="another")
        gateway.refusal = None
        assert text_of(await client.whole(key="another")) == TEXT


async def test_thousands_of_keys_take_bounded_memory_and_ended_streams_go_first(
    connect: Open, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 5
    async with connect(max_streams=64) as (client, streams):
        running = await client.broken(3, key="running")
        gateway.n_before_pause = None
        n_keys = by_day(150, at_night=1000)
        for first in range(0, n_keys, 50):
            keys = [f"key-{number}" for number in range(first, first + 50)]
            for answer in await asyncio.gather(*(client.whole(key=key) for key in keys)):
                assert text_of(answer) == TEXT
            streams.check()
        assert streams.n_kept == 64
        gateway.resume.set()
        rest = await client.whole(key="running", last=running[-1].id)
        assert text_of(running + rest) == TEXT
        assert len(gateway.requests) == n_keys + 1, "the running one was never dropped"


async def test_bytes_of_all_streams_are_bounded_and_what_is_dropped_is_computed_again(
    connect: Open, gateway: ScriptedGateway
) -> None:
    async with connect(max_bytes=4096) as (client, streams):
        whole = await client.whole(max_tokens=150, ignore_eos=True)
        assert len(whole) > 100, "many times what may be kept"
        streams.check()
        assert not streams.n_kept
        rest = await client.whole(max_tokens=150, ignore_eos=True, last=whole[70].id)
        assert [each.id for each in rest] == [each.id for each in whole[71:]]


async def test_a_flood_of_keys_drops_no_stream_of_another_tenant(
    connect: Open, gateway: ScriptedGateway, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    keys = [add_tenant(file, name) for name in ("quiet", "loud")]
    tenants = Tenants.read(file)
    async with connect(keys=keys, tenants=tenants, max_streams=8, max_bytes=32_000) as run:
        quiet, loud, streams = run
        first = await quiet.broken(3)
        await until(lambda: not gateway.live)
        for number in range(30):
            await loud.whole(key=f"key-{number}")
        n_requests = len(gateway.requests)
        rest = await quiet.whole(last=first[-1].id)
        assert text_of(first + rest) == TEXT
        assert len(gateway.requests) == n_requests, "it was kept"
        assert streams.n_kept <= 8


def _has_cancelled(gateway: ScriptedGateway, n: int) -> bool:
    return len(gateway.cancelled) == n


async def test_a_tenants_streams_without_clients_are_as_many_as_its_requests_may_be(
    connect: Open, gateway: ScriptedGateway, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    key = add_tenant(file, "lab")
    file.write_text(file.read_text().rstrip() + "\nmax_concurrent = 2\n")
    gateway.n_before_pause = 5
    async with connect(keys=[key], tenants=Tenants.read(file)) as (client, streams):
        for number in range(5):
            await client.broken(3, key=f"key-{number}")
            n_ended = max(0, number - 1)
            await until(partial(_has_cancelled, gateway, n_ended))
        assert streams.n_kept == 2
        assert len(gateway.live) == 2


@pytest.mark.parametrize("key", ["k", None])
async def test_a_client_that_does_not_read_stops_a_stream_that_is_not_kept(
    connect: Open, key: str | None
) -> None:
    card = ModelCard(name="lab/moon", max_context=1_000_000, created=1)
    endless = ScriptedGateway([65], model=card)
    async with connect(0, gateway=endless) as (client, _):
        async with client.opened(3, key=key, max_tokens=900_000):
            before = -1
            while endless.n_said != before:
                before = endless.n_said
                await asyncio.sleep(0.3)
            assert endless.n_said < 200_000
        await until(lambda: endless.cancelled)


# -- what is kept of streams: numbered events, and which streams go first --------------------------

TAG = "0" * 12


@dataclass(frozen=True)
class Kept:
    tenant: str
    phase: StreamPhase
    since_s: float
    n_bytes: int = 10


def victim(*streams: Kept) -> Kept:
    """The same for every order in which the streams are kept."""
    first = choose_victim(streams, lambda _: 1)
    for seed in range(5):
        mixed = random.Random(seed).sample(streams, len(streams))
        assert choose_victim(mixed, lambda _: 1) == first
    return first


def test_ended_streams_go_before_those_that_run_and_these_before_those_that_are_read() -> None:
    read = Kept("lab", StreamPhase.ATTACHED, 1)
    runs = Kept("lab", StreamPhase.DETACHED, 2)
    ended = Kept("lab", StreamPhase.ENDED, 3)
    assert victim(read, runs, ended) == ended
    assert victim(read, runs) == runs
    assert victim(read) == read
    oldest = Kept("lab", StreamPhase.ENDED, 0)
    assert victim(read, ended, oldest) == oldest, "of equal streams the oldest goes"


def test_the_tenant_with_most_streams_or_bytes_pays_and_an_empty_stream_frees_none() -> None:
    quiet = Kept("quiet", StreamPhase.ENDED, 0)
    loud = [Kept("loud", StreamPhase.ATTACHED, since_s) for since_s in (2, 1)]
    assert victim(quiet, *loud) == loud[1]
    large = Kept("few", StreamPhase.ATTACHED, 9, n_bytes=1000)
    empty = Kept("few", StreamPhase.ENDED, 0, n_bytes=0)
    small = [Kept("many", StreamPhase.ENDED, since_s) for since_s in range(5)]
    assert choose_victim([empty, *small, large], lambda each: each.n_bytes) == large


@pytest.mark.random_seeds(20)
def test_pieces_of_events_put_together_are_all_of_them_and_short(seed: int) -> None:
    dice = random.Random(seed)
    log = EventLog(TAG)
    for number in range(1, 60):
        n_before = log.n_events
        events = [
            b"data: %s\n\n" % (b"x" * dice.randint(0, 900)) for _ in range(dice.randint(1, 3))
        ]
        log.append(b"".join(events), f"{number:012x}")
        assert log.n_events == n_before + len(events)
    first = dice.randrange(log.n_events - 1)
    log.trim(first)
    n, pieces = first, list[bytes]()
    while n < log.n_events:
        piece, n = log.after(n, 1500)
        assert len(piece) <= 1500
        pieces.append(piece)
    numbers = [
        int(line[4:].split(b"-")[0])
        for line in b"".join(pieces).split(b"\n")
        if line.startswith(b"id: ")
    ]
    assert numbers == list(range(first + 1, log.n_events + 1))


def test_a_long_event_is_a_piece_by_itself() -> None:
    log = EventLog(TAG)
    log.append(b"data: %s\n\n" % (b"x" * 5000), TAG)
    log.append(b"data: short\n\n", TAG)
    piece, n = log.after(0, 100)
    assert (len(piece) > 5000, n) == (True, 1)


def test_a_trimmed_log_knows_its_numbers_and_holds_the_bytes_that_it_says() -> None:
    log = EventLog(TAG)
    for token in range(10):
        log.append(b"data: %d\n\n" % token, f"{token:012x}")
    log.trim(8)
    assert log.n_events == 10
    assert log.id_of(8) == f"8-{TAG}-{7:012x}"
    assert log.id_of(11) is None
    piece, n = log.after(7, 10_000)
    assert (len(piece), n) == (log.n_bytes, 10)
    log.trim(3)  # what is gone stays gone
    assert log.n_events == 10
