"""What `halfmoon bench` sends, and when: a function of settings, seed and salt."""

import itertools
import json
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_cli.bench.bench_settings import BadBenchSettings, BenchSettings, plan_workload
from halfmoon_cli.bench.load_plan import (
    PlannedRequest,
    PromptPart,
    RequestChain,
    plan_from_trace,
    plan_stats,
    plan_synthetic,
)
from halfmoon_cli.bench.prompt_writer import PromptWriter, RequestFormat, request_body
from halfmoon_simulator.workloads.traces import TraceRequest

VOCABULARY = range(1000)


def made_up(**changes: Any) -> list[RequestChain]:
    load: dict[str, Any] = {
        "n_requests": 50,
        "until_s": inf,
        "rate_per_s": 10.0,
        "n_input": 20,
        "n_output": 5,
        "n_shared": 30,
        "n_prefixes": 4,
    }
    return plan_synthetic(**{**load, **changes})


# Made-up loads


def test_the_same_seed_gives_the_same_load_and_another_one_another() -> None:
    assert made_up(seed=3) == made_up(seed=3)
    assert made_up(seed=3) != made_up(seed=4)


def test_another_rate_changes_arrivals_and_nothing_else() -> None:
    slow, fast = made_up(rate_per_s=1.0), made_up(rate_per_s=10.0)
    for (a,), (b,) in zip(slow, fast, strict=True):
        assert (a.parts, a.n_output) == (b.parts, b.n_output)
        assert a.at_s == pytest.approx(10 * b.at_s)


def test_arrivals_are_poisson_at_the_rate() -> None:
    chains = made_up(n_requests=20_000, rate_per_s=50.0)
    moments = [chain[0].at_s for chain in chains]
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)


def test_arrivals_end_at_their_number_or_their_time() -> None:
    assert len(made_up(n_requests=7)) == 7
    within = made_up(n_requests=inf, until_s=3.0)
    assert within == made_up(n_requests=len(within) + 1)[:-1]
    assert within[-1][0].at_s < 3.0 <= made_up(n_requests=len(within) + 1)[-1][0].at_s


def test_prompts_share_as_many_prefixes_as_there_are_and_no_more() -> None:
    chains = made_up()
    assert {chain[0].parts[0].key for chain in chains} == {f"prefix {i}" for i in range(4)}
    own = [chain[0].parts[1].key for chain in chains]
    assert len(set(own)) == len(own)
    found = plan_stats(chains)
    assert found.shared == pytest.approx(46 * 30 / (50 * 50))


# Traces


#: Tokens of a block of the traces below.
BLOCK = 16


@st.composite
def traced(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests that continue one another's prefixes."""
    requests: list[TraceRequest] = []
    fresh = 0
    for index in range(draw(st.integers(1, 8))):
        n_input = draw(st.integers(1, 100))
        n_blocks = -(-n_input // BLOCK)
        of = draw(st.sampled_from(requests)) if requests else None
        n_shared = draw(st.integers(0, min(n_blocks, len(of.blocks)))) if of else 0
        shared = of.blocks[:n_shared] if of else ()
        own = tuple(range(fresh, fresh + n_blocks - n_shared))
        fresh += len(own)
        requests.append(TraceRequest(index / 10, n_input, draw(st.integers(1, 900)), shared + own))
    return requests


def written(writer: PromptWriter, parts: Sequence[PromptPart]) -> Any:
    return json.loads(bytes(writer.prompt(parts)))


def tokens_of(planned: PlannedRequest) -> list[int]:
    tokens: list[int] = written(PromptWriter(VOCABULARY, "s"), planned.parts)
    return tokens


@given(traced(), st.sampled_from([1.0, 0.03, 0.1, 0.37, 2.0]))
def test_equal_hash_ids_are_equal_tokens_at_any_scale(
    requests: list[TraceRequest], scale: float
) -> None:
    block = max(1, round(BLOCK * scale))
    chains = plan_from_trace(requests, block_tokens=BLOCK, scale=scale)
    prompts = [tokens_of(chain[0]) for chain in chains]
    for request, prompt in zip(requests, prompts, strict=True):
        assert len(request.blocks) == -(-len(prompt) // block)
        for other, other_prompt in zip(requests, prompts, strict=True):
            n_same = sum(a == b for a, b in zip(request.blocks, other.blocks, strict=False))
            n_tokens = min(n_same * block, len(prompt), len(other_prompt))
            assert prompt[:n_tokens] == other_prompt[:n_tokens]


def test_at_its_own_scale_a_trace_is_as_long_as_it_says() -> None:
    request = TraceRequest(0.0, 1300, 77, (1, 2, 3))
    ((planned,),) = plan_from_trace([request])
    assert (planned.n_input, planned.n_output) == (1300, 77)
    assert planned.parts[-1] == PromptPart("block 3", 1300 - 1024)
    ((small,),) = plan_from_trace([request], scale=0.1)
    assert (small.n_input, small.n_output) == (51 + 51 + 28, 8)


@given(traced(), st.integers(1, 120), st.integers(1, 400))
def test_a_cut_prompt_is_the_beginning_of_the_whole_one(
    requests: list[TraceRequest], most_input: int, most_output: int
) -> None:
    whole = plan_from_trace(requests, block_tokens=BLOCK)
    cut = plan_from_trace(
        requests, block_tokens=BLOCK, most_input=most_input, most_output=most_output
    )
    for (a,), (b,) in zip(whole, cut, strict=True):
        assert tokens_of(b) == tokens_of(a)[:most_input]
        assert b.n_output == min(a.n_output, most_output)


def test_turns_of_a_session_follow_one_another_whoever_comes_between() -> None:
    requests = [
        TraceRequest(0.0, 10, 1, (1,), "s"),
        TraceRequest(1.0, 10, 1, (2,)),
        TraceRequest(0.5, 10, 1, (1,), "s"),
    ]
    assert [[turn.index for turn in chain] for chain in plan_from_trace(requests)] == [[0, 2], [1]]


# Prompts


def test_prompts_have_tokens_of_the_vocabulary_and_others_with_another_salt() -> None:
    parts = (PromptPart("a", 40), PromptPart("b", 3))
    one, again, other = (written(PromptWriter(VOCABULARY, s), parts) for s in "112")
    assert one == again != other
    assert len(one) == len(other) == 43
    writer = PromptWriter((5, 700, 31), "s")
    assert set(written(writer, [PromptPart("a", 200)])) == {5, 31, 700}


def test_what_is_kept_of_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon_cli.bench.prompt_writer._KEPT_BYTES", 2000)
    writer = PromptWriter(VOCABULARY, "s")
    first = writer.prompt([PromptPart("p 0", 100)])
    for number in range(50):
        writer.prompt([PromptPart(f"p {number}", 100)])
        assert len(writer._parts) <= 10
    # Made anew, it is the same.
    assert bytes(writer.prompt([PromptPart("p 0", 100)])) == bytes(first)


def test_a_body_asks_for_what_the_form_says() -> None:
    planned = PlannedRequest(index=0, at_s=0, parts=(PromptPart("a", 3),), n_output=9, priority=2)
    writer = PromptWriter(VOCABULARY, "s")
    body = json.loads(request_body(RequestFormat(model="m"), writer, planned))
    prompt = body.pop("prompt")
    assert len(prompt) == 3
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.0,
        "ignore_eos": True,
        # In a trace the largest goes first, in requests the smallest.
        "priority": -2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    form = RequestFormat(model="m", ignore_eos=False)
    assert "ignore_eos" not in json.loads(request_body(form, writer, planned))


# Settings


def test_a_duration_makes_as_many_requests_as_come_in_it() -> None:
    chains = plan_workload(BenchSettings(rate_per_s=20.0, duration_s=100.0)).chains
    assert 1700 < len(chains) < 2300
    assert max(chain[0].at_s for chain in chains) > 98.0


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Five requests, of which one comes each second."""
    rows = [
        {"timestamp": 1000 * i, "input_length": 20, "output_length": 5, "hash_ids": [i, i + 9]}
        for i in range(5)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "trace.jsonl")


def test_a_trace_twice_as_fast_has_the_same_prompts(trace: str) -> None:
    settings: dict[str, Any] = {"trace": trace, "block_tokens": 16, "n_requests": 4}
    slow, fast = (
        plan_workload(BenchSettings(**settings, speedup=speedup)).chains for speedup in (1.0, 2.0)
    )
    assert [chain[0].at_s for chain in slow] == [0.0, 1.0, 2.0, 3.0]
    assert [chain[0].at_s for chain in fast] == [0.0, 0.5, 1.0, 1.5]
    assert [chain[0].parts for chain in slow] == [chain[0].parts for chain in fast]


def test_a_duration_leaves_out_requests_of_a_trace_that_arrive_later(
    trace: str, tmp_path: Path
) -> None:
    settings = BenchSettings(trace=trace, block_tokens=16, duration_s=2.0)
    assert [chain[0].at_s for chain in plan_workload(settings).chains] == [0.0, 1.0]
    late = tmp_path / "late.jsonl"
    late.write_text('{"timestamp":5000,"input_length":5,"output_length":1,"hash_ids":[0]}')
    with pytest.raises(BadBenchSettings, match="--duration 2 s"):
        plan_workload(BenchSettings(trace=str(late), duration_s=2.0))


def test_the_simulators_workloads_go_by_their_names() -> None:
    workload = plan_workload(BenchSettings(trace="hot-prefixes", n_requests=20))
    assert len(workload.chains) == 20 and "hot-prefixes" in workload.description
