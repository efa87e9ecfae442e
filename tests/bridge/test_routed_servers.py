"""Requests through a conductor at plain servers: placement, faults, tenants, ends."""

import asyncio

import msgspec
import pytest

from halfmoon_conductor.errors import GenerationFailed, InvalidRequest, ServiceUnavailable
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.conductor import request_admission
from tests.bridge.conftest import GREEDY, routed
from tests.bridge.plain_server import BLOCK_SIZE, answer_of, next_token, plain_servers


async def test_the_answer_is_the_servers_own_and_a_stop_token_ends_it(prompt: list[int]) -> None:
    stop = answer_of(prompt, 5)[-1]
    async with plain_servers(1) as (server,), routed(server) as fleet:
        assert await fleet.generate(prompt, 20) == answer_of(prompt, 20)
        assert await fleet.generate(prompt, 1) == answer_of(prompt, 1)
        stopping = Stopping(max_new_tokens=50, stop_token_ids=(stop,))
        assert await fleet.generate(prompt, stopping=stopping) == answer_of(prompt, 5)
        first = Stopping(max_new_tokens=50, stop_token_ids=(next_token(prompt),))
        assert await fleet.generate(prompt, stopping=first) == answer_of(prompt, 1)
        await fleet.settled()


@pytest.mark.parametrize("has_events", [True, False])
async def test_a_prefix_goes_to_the_server_that_has_it(prompt: list[int], has_events: bool) -> None:
    async with plain_servers(3, has_events=has_events) as servers, routed(*servers) as fleet:
        await fleet.generate(prompt, 1)
        (first,) = [i for i, server in enumerate(servers) if server.bodies]
        await fleet.until_indexed(first, len(prompt) // BLOCK_SIZE)
        for n in range(3):
            assert await fleet.n_cached([*prompt, *range(n, 40)]) == 400
        assert [len(server.bodies) for server in servers if server.bodies] == [4]
        assert servers[first].cached[1:] == [400] * 3, "the server agrees"
        await fleet.settled()


async def test_a_prompt_counts_as_cached_from_its_start_until_no_request_has_it(
    prompt: list[int],
) -> None:
    n_blocks = len(prompt) // BLOCK_SIZE
    async with plain_servers(1, has_events=False) as (server,), routed(server) as fleet:
        server.go.clear()
        tasks = [asyncio.create_task(fleet.generate([*prompt, n], 4)) for n in range(2)]
        await fleet.until_indexed(0, n_blocks)
        await fleet.until(lambda: server.n_open == 2)
        tasks[0].cancel()
        await fleet.until(lambda: server.n_open == 1)
        tasks.append(asyncio.create_task(fleet.generate([*prompt, 7], 4)))
        await fleet.until(lambda: server.n_open == 2)
        assert len(fleet.core.index) == n_blocks, "the second request has them yet"
        for task in tasks:
            task.cancel()
        await fleet.until(lambda: len(fleet.core.index) == 0)


async def test_what_the_answer_added_counts_for_the_next_turn(prompt: list[int]) -> None:
    async with plain_servers(1, has_events=False) as (server,), routed(server) as fleet:
        turn = [*prompt, *await fleet.generate(prompt, 60), *range(10)]
        await fleet.until_indexed(0, 28)
        assert await fleet.n_cached(turn) == 448
        assert server.cached[-1] == 448


async def test_a_server_that_clears_its_cache_holds_no_prefix(prompt: list[int]) -> None:
    async with plain_servers(1) as (server,), routed(server) as fleet:
        await fleet.generate(prompt, 1)
        await fleet.until_indexed(0, 24)
        await fleet.until(lambda: server.n_open == 0)
        await server.clear()
        await fleet.until(lambda: len(fleet.core.index) == 0)
        assert await fleet.n_cached(prompt) == 0


async def test_requests_spread_over_servers_that_are_busy(prompt: list[int]) -> None:
    async with plain_servers(2) as servers, routed(*servers) as fleet:
        for server in servers:
            server.go.clear()
        tasks = [asyncio.create_task(fleet.generate([n, *prompt], 4)) for n in range(8)]
        await fleet.until(lambda: sum(server.n_open for server in servers) == 8)
        assert [server.n_open for server in servers] == [4, 4]
        for server in servers:
            server.go.set()
        answers = await asyncio.gather(*tasks)
        assert answers == [answer_of([n, *prompt], 4) for n in range(8)]
        await fleet.settled()


# -- faults ----------------------------------------------------------------------------------


async def test_an_answer_goes_on_at_another_server_when_its_server_is_killed(
    prompt: list[int],
) -> None:
    async with plain_servers(2) as servers, routed(*servers) as fleet:
        for server in servers:
            server.go.clear()
        task = asyncio.create_task(fleet.generate(prompt, 30))
        await fleet.until(lambda: any(server.n_open for server in servers))
        (at,) = [i for i, server in enumerate(servers) if server.n_open]
        servers[1 - at].go.set()
        await servers[at].kill()
        assert await task == answer_of(prompt, 30)
        await fleet.until_live(1 - at)
        assert await fleet.generate(prompt, 3) == answer_of(prompt, 3)
        # It comes back under its address, with an empty cache.
        servers[at].go.set()
        await servers[at].open()
        await fleet.until_live(0, 1)
        assert fleet.core.index.n_blocks(f"server-{at}-kvstore") == 0  # type: ignore[arg-type]
        await fleet.settled()


async def test_without_a_server_requests_are_unavailable_until_one_is_back(
    prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_admission, "RETURN_S", 0.2)
    async with plain_servers(2) as servers, routed(*servers) as fleet:
        for server in servers:
            await server.kill()
        await fleet.until(lambda: not fleet.live())
        with pytest.raises(ServiceUnavailable):
            await fleet.generate(prompt)
        for server in servers:
            await server.open()
        await fleet.until_live(0, 1)
        assert await fleet.generate(prompt, 3) == answer_of(prompt, 3)


@pytest.mark.parametrize("fault", ["silent end", "garbage", "hang"])
@pytest.mark.parametrize("after", [0, 3])
async def test_an_answer_that_breaks_off_goes_on_at_another_server(
    prompt: list[int], fault: str, after: int
) -> None:
    async with plain_servers(2) as servers, routed() as fleet:
        for server in servers:
            fleet.bridge(server, stall_s=0.3)
        await fleet.until_live(0, 1)
        servers[0].fault, servers[0].fault_after = fault, after
        assert await fleet.generate(prompt, 12) == answer_of(prompt, 12)
        assert len(servers[1].bodies) == 1, "the server that failed it is avoided"
        await fleet.until_live(0, 1)
        servers[0].fault = ""
        await fleet.settled()


async def test_a_server_that_answers_500_is_avoided(prompt: list[int]) -> None:
    async with plain_servers(2, fault="500") as servers, routed(*servers) as fleet:
        servers[1].fault = ""
        assert await fleet.generate(prompt, 5) == answer_of(prompt, 5)
        servers[1].fault = "500"
        with pytest.raises(GenerationFailed, match="tries in a row"):
            await fleet.generate(prompt)
        await fleet.settled()


async def test_a_server_that_hangs_is_down_until_it_answers_again(prompt: list[int]) -> None:
    async with plain_servers(2) as servers, routed() as fleet:
        for server in servers:
            fleet.bridge(server, status_s=0.3)
            server.go.clear()
        await fleet.until_live(0, 1)
        task = asyncio.create_task(fleet.generate(prompt, 12))
        await fleet.until(lambda: any(server.n_open for server in servers))
        (at,) = [i for i, server in enumerate(servers) if server.n_open]
        servers[at].thaw.clear()
        for server in servers:
            server.go.set()
        assert await task == answer_of(prompt, 12)
        await fleet.until_live(1 - at)
        servers[at].thaw.set()
        await fleet.until_live(0, 1)
        await fleet.settled()


async def test_a_sick_server_leaves_and_comes_back(prompt: list[int]) -> None:
    async with plain_servers(2, fault="500") as servers, routed(*servers) as fleet:
        servers[1].fault = ""
        servers[0].is_sick = True
        servers[0].fault = "silent end"
        assert await fleet.generate(prompt, 5) == answer_of(prompt, 5)
        await fleet.until_live(1)
        servers[0].is_sick, servers[0].fault = False, ""
        await fleet.until_live(0, 1)
        await fleet.settled()


# -- what a server can't do ------------------------------------------------------------------


async def test_what_servers_can_not_do_is_refused_by_name_before_anything_is_spent(
    prompt: list[int],
) -> None:
    async with plain_servers(1) as (server,), routed(server) as fleet:
        for field, value in (("prompt_logprobs", 1), ("grammar", 'start: "a" | "b"')):
            sampling = msgspec.structs.replace(GREEDY, **{field: value})
            with pytest.raises(InvalidRequest, match=field) as caught:
                await fleet.generate(prompt, sampling=sampling)
            assert server.url not in str(caught.value)
        assert not server.bodies
        await fleet.settled()


async def test_a_request_that_the_server_refuses_is_not_tried_again(prompt: list[int]) -> None:
    async with plain_servers(2, fault="400") as servers, routed(*servers) as fleet:
        with pytest.raises(InvalidRequest, match="no such thing") as caught:
            await fleet.generate(prompt)
        assert sum(len(server.bodies) for server in servers) == 1
        assert "http://" not in str(caught.value)
        await fleet.settled()


# -- tenants, clients, room ------------------------------------------------------------------


async def test_tenants_share_no_prefix(prompt: list[int]) -> None:
    async with plain_servers(1) as (server,), routed(server) as fleet:
        await fleet.generate(prompt, 1, salt="ada\x1f")
        await fleet.until_indexed(0, 24)
        assert await fleet.n_cached(prompt, salt="bruno\x1f") == 0
        assert await fleet.n_cached(prompt) == 0
        assert await fleet.n_cached(prompt, salt="ada\x1f") == 384
        assert server.cached == [0, 0, 0, 384]
        salts = [body.get("cache_salt", "") for body in server.bodies]
        assert salts == ["ada\x1f", "bruno\x1f", "", "ada\x1f"]


async def test_a_client_that_leaves_ends_its_request_at_the_server(prompt: list[int]) -> None:
    async with plain_servers(1) as (server,), routed(server) as fleet:
        server.go.clear()
        events = fleet.events(prompt, 50)
        await anext(events)
        assert server.n_open == 1
        await events.aclose()  # type: ignore[attr-defined]
        await fleet.until(lambda: server.n_open == 0)
        await fleet.settled()


async def test_requests_wait_while_no_server_has_room(prompt: list[int]) -> None:
    # Two prompts of 26 pages, and no third one.
    async with plain_servers(1, n_blocks=60) as (server,), routed(server) as fleet:
        server.go.clear()
        tasks = [asyncio.create_task(fleet.generate([n, *prompt], 3)) for n in range(4)]
        await fleet.until(lambda: fleet.core.n_requests["waiting"] == 2)
        await fleet.until(lambda: server.n_open == 2)
        assert fleet.core.n_requests["waiting"] == 2
        server.go.set()
        answers = await asyncio.gather(*tasks)
        assert answers == [answer_of([n, *prompt], 3) for n in range(4)]
        await fleet.settled()


# -- prefill and decode pairs ----------------------------------------------------------------


@pytest.mark.parametrize("differs", [False, True])
async def test_a_pair_passes_its_kv_through_the_conductor(prompt: list[int], differs: bool) -> None:
    async with plain_servers(2) as (prefill, decode), routed() as fleet:
        decode.differs = differs
        await fleet.bridge_pair(prefill, decode)
        assert fleet.live() == {"server-0-prefill", "server-0-kvstore", "server-1-decode"}
        assert await fleet.generate(prompt, 10, salt="ada\x1f") == answer_of(prompt, 10)
        assert prefill.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
        first, *others = decode.bodies
        assert first["kv_transfer_params"] == prefill.pair_params
        assert first["prompt"] == prompt and first["cache_salt"] == "ada\x1f"
        assert len(others) == differs, "another first token is computed from the client's"
        assert not decode.released
        await fleet.settled()


async def test_a_failed_decode_of_a_pair_begins_with_a_new_prefill(prompt: list[int]) -> None:
    async with plain_servers(3) as (prefill, bad, good), routed() as fleet:
        bad.fault, bad.fault_after = "silent end", 4
        await fleet.bridge_pair(prefill, bad, good)
        assert await fleet.generate(prompt, 10) == answer_of(prompt, 10)
        assert len(prefill.bodies) == 2
        assert len(good.bodies) == 1
        await fleet.settled()


async def test_blocks_that_no_decode_server_fetches_are_released(prompt: list[int]) -> None:
    async with plain_servers(3) as (prefill, bad, good), routed() as fleet:
        bad.fault = "silent end"
        await fleet.bridge_pair(prefill, bad, good)
        assert await fleet.generate(prompt, 10) == answer_of(prompt, 10)
        await fleet.until(lambda: len(bad.released) == 1)
        assert good.bodies[0]["kv_transfer_params"] == prefill.pair_params
        assert bad.released != [prefill.pair_params], "those of the first try"
        await fleet.settled()


async def test_a_pair_answers_one_token_without_its_decode_server(prompt: list[int]) -> None:
    async with plain_servers(2) as (prefill, decode), routed() as fleet:
        await fleet.bridge_pair(prefill, decode)
        assert await fleet.generate(prompt, 1) == answer_of(prompt, 1)
        stopping = Stopping(max_new_tokens=9, stop_token_ids=(next_token(prompt),))
        assert await fleet.generate(prompt, stopping=stopping) == answer_of(prompt, 1)
        assert not decode.bodies
        await fleet.until(lambda: len(decode.released) == 2)
        await fleet.settled()
