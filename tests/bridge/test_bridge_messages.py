"""What a bridge answers to messages that no careful conductor sends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from halfmoon_protocol import error_codes
from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.messages import (
    Cancel,
    DecodeFailed,
    DecodeRefused,
    DecodeReserved,
    Hello,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillStopped,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    TokensProduced,
)
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Stopping
from halfmoon_runtime.channels.network import WorkerLink
from tests.bridge.conftest import GREEDY, WITHIN_S, RoutedServers, routed
from tests.bridge.plain_server import PlainServer, answer_of, plain_servers

R = RequestId("foreign-1")
STOPPING = Stopping(max_new_tokens=3)


class Caller:
    """Another conductor, with a link to a worker."""

    def __init__(self, link: WorkerLink) -> None:
        self._link, self.close = link, link.close

    def send(self, message: Message) -> None:
        self._link.send_now(message)

    async def hear(self, *kinds: type[Message]) -> Any:
        """Return the next message of these kinds; loads and others are skipped."""
        async with asyncio.timeout(WITHIN_S):
            while not isinstance(message := await self._link.receive(), kinds):
                pass
        return message


@pytest.fixture
async def server() -> AsyncIterator[PlainServer]:
    async with plain_servers(1) as (running,):
        yield running


@pytest.fixture
async def fleet(server: PlainServer) -> AsyncIterator[RoutedServers]:
    async with routed(server) as running:
        yield running


async def caller(fleet: RoutedServers, role: str) -> Caller:
    info = fleet.core.cluster.get(f"server-0-{role}")  # type: ignore[arg-type]
    assert info is not None
    found = Caller(await fleet.network.dial(info.commands, info.events))
    fleet.stack.push_async_callback(found.close)
    found.send(Hello(conductor_id=ConductorId("conductor-9"), session=1))
    return found


Pair = tuple[Caller, Caller]


@pytest.fixture
async def pair(fleet: RoutedServers) -> Pair:
    """Links of the other conductor to the decode and the prefill worker of the server."""
    return await caller(fleet, "decode"), await caller(fleet, "prefill")


async def reserved(decode: Caller, n_tokens: int) -> Landing:
    decode.send(ReserveDecode(request_id=R, n_tokens=n_tokens, stopping=STOPPING))
    landing = (await decode.hear(DecodeReserved)).landing
    assert isinstance(landing, Landing)
    return landing


def start(prompt: list[int], landing: Landing) -> StartPrefill:
    layout = landing.layout
    hashes = block_hashes(prompt, model=layout.model, block_size=layout.block_size)
    return StartPrefill(
        request_id=R,
        token_ids=tuple(prompt),
        n_prompt=len(prompt),
        block_hashes=tuple(hashes),
        landing=landing,
        landing_expires_s=60.0,
        sampling=GREEDY,
        stopping=STOPPING,
    )


def start_decode(first_token: int) -> StartDecode:
    return StartDecode(
        request_id=R, first_token=first_token, sampling=GREEDY, stopping=STOPPING, n_prompt=1
    )


async def test_each_command_is_answered_and_a_second_one_changes_nothing(
    fleet: RoutedServers, pair: Pair, prompt: list[int]
) -> None:
    decode, prefill = pair
    landing = await reserved(decode, len(prompt))
    assert len(set(landing.pages)) == 25
    again = ReserveDecode(request_id=R, n_tokens=5, stopping=STOPPING)
    decode.send(again)
    others = await caller(fleet, "decode"), await caller(fleet, "prefill")
    others[0].send(again)
    assert (await others[0].hear(DecodeRefused)).code == error_codes.ID_IN_USE
    for _ in range(2):
        prefill.send(start(prompt, landing))
    others[1].send(start(prompt, landing))
    assert (await others[1].hear(PrefillFailed)).code == error_codes.ID_IN_USE
    done = await prefill.hear(PrefillDone, PrefillFailed)
    expected = answer_of(prompt, 3)
    assert isinstance(done, PrefillDone) and done.first_token == expected[0]
    decode.send(start_decode(done.first_token))
    produced: list[int] = []
    while len(produced) < 2:
        message = await decode.hear(TokensProduced)
        produced += [one.token for one in message.produced]
    assert produced == expected[1:]
    decode.send(start_decode(done.first_token))
    assert (await decode.hear(DecodeFailed)).retryable
    await fleet.settled()


async def test_a_prefill_without_a_reservation_or_of_another_length_is_not_sent(
    fleet: RoutedServers, pair: Pair, server: PlainServer, prompt: list[int]
) -> None:
    decode, prefill = pair
    landing = await reserved(decode, len(prompt))
    prefill.send(start(prompt[:-1], landing))
    failed = await prefill.hear(PrefillFailed)
    assert failed.reason == "399 tokens to prefill, 400 reserved" and not failed.retryable
    decode.send(Cancel(request_id=R))
    await fleet.settled()
    prefill.send(start(prompt, landing))
    assert (await prefill.hear(PrefillFailed)).retryable
    assert not server.bodies


async def test_a_cancelled_prefill_is_stopped_at_the_server(
    fleet: RoutedServers, pair: Pair, server: PlainServer, prompt: list[int]
) -> None:
    server.fault = "hang"
    decode, prefill = pair
    prefill.send(start(prompt, await reserved(decode, len(prompt))))
    await fleet.until(lambda: server.n_open == 1)
    prefill.send(Cancel(request_id=R))
    await prefill.hear(PrefillStopped)
    await fleet.until(lambda: server.n_open == 0)
    prefill.send(Cancel(request_id=RequestId("unknown")))
    assert (await prefill.hear(PrefillStopped)).request_id == "unknown"
    decode.send(Cancel(request_id=R))
    await fleet.settled()


async def test_decode_of_another_connection_is_refused_and_its_cancel_ignored(
    fleet: RoutedServers, prompt: list[int]
) -> None:
    decode, other = await caller(fleet, "decode"), await caller(fleet, "decode")
    await reserved(decode, len(prompt))
    other.send(Cancel(request_id=R))
    other.send(start_decode(7))
    assert (await other.hear(DecodeFailed)).request_id == R
    session = fleet.supervisors[0].session
    assert session is not None and session.n_requests == 1
    decode.send(start_decode(7))
    failed = await decode.hear(DecodeFailed)
    assert failed.reason == "its prefill is not done"
    await fleet.settled()


async def test_a_caller_that_is_gone_leaves_nothing_behind(
    fleet: RoutedServers, pair: Pair, server: PlainServer, prompt: list[int]
) -> None:
    server.go.clear()
    decode, prefill = pair
    prefill.send(start(prompt, await reserved(decode, len(prompt))))
    done = await prefill.hear(PrefillDone)
    decode.send(start_decode(done.first_token))
    await fleet.until(lambda: server.n_open == 1)
    await decode.close()
    server.go.set()
    await fleet.settled()
    await fleet.until(lambda: server.n_open == 0)
