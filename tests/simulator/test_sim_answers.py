"""Simulated decode workers put their answers into kvstores; a session's next turn finds them."""

import random
from typing import Any

import pytest

from halfmoon_simulator.cluster.cluster_sim import WorkerFault
from halfmoon_simulator.results.run_results import RunResult
from halfmoon_simulator.workloads.conversations import conversations
from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest
from tests.simulator.worlds import EVERY, a_world, audit_steps

BLOCK = 16
#: Tokens of each turn's message and answer.
TURNS = ((40, 30), (9, 33), (20, 2), (5, 64), (16, 16), (50, 20))


def session(
    *turns: tuple[int, int], name: str = "s", at_s: float = 0.0, pause_s: float = 50.0
) -> list[TraceRequest]:
    """Return a conversation in blocks of 16 tokens."""
    first_id = 1_000_000 * (1 + sum(name.encode()))
    requests, n_said = [], 0
    for turn, (n_message, n_output) in enumerate(turns):
        n_input = n_said + n_message
        n_full, n_rest = divmod(n_input, BLOCK)
        blocks = [first_id + i for i in range(n_full)]
        blocks += [first_id + 500_000 + turn] if n_rest else []
        start_s = pause_s if turn else at_s
        requests.append(TraceRequest(start_s, n_input, n_output, tuple(blocks), name))
        n_said = n_input + n_output
    return requests


def run(
    requests: list[TraceRequest],
    faults: tuple[WorkerFault, ...] = (),
    check_every: int = EVERY,
    **changes: Any,
) -> RunResult:
    """Simulate, and audit after every so many events."""
    world = a_world(*requests, faults=faults, **changes)
    audit_steps(world, check_every)
    assert all(worker.answers.is_idle or worker.dead for worker in world.decodes.values())
    return world.result()


def whole(n_tokens: int) -> int:
    return max(0, n_tokens) // BLOCK * BLOCK


@pytest.mark.parametrize("workers", [(1, 1), (3, 2)])
def test_each_turn_finds_all_whole_blocks_of_prompts_and_answers(workers: tuple[int, int]) -> None:
    n_prefill, n_decode = workers
    n_said = 0
    result = run(session(*TURNS), n_prefill=n_prefill, n_decode=n_decode)
    for turn, record in enumerate(result.records):
        assert record.turn == turn
        assert record.n_cached == whole(n_said - 1)  # the last token is never run
        n_said = record.n_input + record.n_output
    shares = [record.n_cached / record.n_input for record in result.records]
    assert result.summary().reused_by_turn == tuple(shares)


def test_without_kept_answers_a_turn_finds_the_prompts_before_it() -> None:
    n_prompt = 0
    for record in run(session(*TURNS), keep_answers=False).records:
        assert record.n_cached == whole(n_prompt)
        n_prompt = record.n_input


def test_an_answer_that_the_next_turn_does_not_repeat_is_not_kept() -> None:
    first, second = session((40, 30), (9, 3))
    blocks = (first.blocks[0], *range(9_000, 9_004))
    other = TraceRequest(50.0, 79, 3, blocks, "s")
    assert [r.n_cached for r in run([first, other]).records] == [0, 16]
    shorter = TraceRequest(50.0, 60, 3, second.blocks[:4], "s")
    assert [r.n_cached for r in run([first, shorter]).records] == [0, 32]


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
def test_lost_workers_and_full_kvstores_cost_cached_tokens_alone(seed: int) -> None:
    dice = random.Random(seed)
    requests: list[TraceRequest] = []
    for i in range(dice.randint(1, 5)):
        turns = [(dice.randint(1, 60), dice.randint(1, 60)) for _ in range(dice.randint(1, 5))]
        name, pause_s = f"{i}" * (i + 1), dice.uniform(0, 30)
        requests += session(*turns, name=name, at_s=5.0 * i, pause_s=pause_s)
    faults = tuple(
        WorkerFault(dice.uniform(0, 150), worker, dice.choice((1.0, 20.0)))
        for worker in ("decode-0", "kvstore-0", "kvstore-1", "prefill-1")
        if dice.random() < 0.5
    )
    result = run(
        requests,
        faults,
        check_every=25,
        n_prefill=2,
        n_decode=2,
        n_slots=dice.choice((8, 40, 400)),
        n_pages=dice.choice((60, 200)),
        disk_bytes=dice.choice((0.0, 1e9)),
    )
    said: dict[int, int] = {}
    for record in sorted(result.records, key=lambda record: record.index):
        assert record.outcome in ("finished", "failed", "rejected")
        n_before = said.get(record.index - 1, 0) if record.turn else 0
        assert record.n_cached <= whole(n_before - 1)
        said[record.index] = record.n_input + record.n_output


def test_turns_of_conversations_begin_with_prompt_and_answer() -> None:
    requests = conversations(n_requests=200, rate_per_s=2.0, seed=1)
    assert len(requests) == 200
    n_later, before = 0, requests[0]
    for request in requests[1:]:
        if request.session == before.session:
            n_later += 1
            n_own = before.n_input // TRACE_BLOCK_TOKENS
            assert request.blocks[:n_own] == before.blocks[:n_own]
            assert request.n_input > before.n_input + before.n_output
        else:
            assert not set(request.blocks) & set(before.blocks)
        assert len(request.blocks) == -(-request.n_input // TRACE_BLOCK_TOKENS)
        assert len(set(request.blocks)) == len(request.blocks)
        before = request
    assert n_later > 100
