"""A prefill token takes 10 ms, a step 40 ms; the limit between tokens is 100 ms."""

from dataclasses import replace
from typing import Any

import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.local_prefill import LocalCandidate, LocalPrefill, choose_local

D0 = LocalCandidate(
    WorkerId("decode-0"),
    PrefillCost(c0_s=0.0, c1_s=0.01, c2_s=0.0),
    step_s=0.04,
    step_with_s=0.041,
    free_pages=10,
    n_cached=96,
    fetch_s=0.02,
)


def chosen(*candidates: LocalCandidate, **changes: Any) -> LocalPrefill | None:
    asked: dict[str, Any] = {
        "n_tokens": 100,
        "n_pages": 8,
        "disaggregated_ttft_s": 0.5,
        "tbt_slo_s": 0.1,
        "chunk_tokens": 64,
    }
    return choose_local(candidates, **(asked | changes))


def test_a_short_rest_is_prefilled_where_it_is_decoded() -> None:
    local = chosen(D0)
    assert local is not None
    assert local.ttft_s == pytest.approx(0.02 + 0.04 + 0.04)
    assert local.stalled_step_s == pytest.approx(0.08)


def test_a_rest_that_would_keep_the_others_waiting_too_long_is_not() -> None:
    assert chosen(replace(D0, n_cached=92)) is None  # 80 ms of computing
    assert chosen(D0, tbt_slo_s=0.07) is None
    assert chosen(replace(D0, step_with_s=0.11)) is None
    assert chosen(replace(D0, step_with_s=0.1)) is not None  # the limit itself is kept


def test_what_needs_several_chunks_or_more_pages_than_are_free_is_not() -> None:
    assert chosen(D0, chunk_tokens=3) is None
    assert chosen(D0, n_pages=11) is None
    fits = replace(D0, worker_id=WorkerId("decode-1"), free_pages=11)
    local = chosen(D0, fits, n_pages=11)
    assert local is not None
    assert local.worker_id == "decode-1"


def test_the_prefill_pool_does_it_when_it_is_faster() -> None:
    assert chosen(D0, disaggregated_ttft_s=0.09) is None
    assert chosen(replace(D0, fetch_s=0.6)) is None


def test_the_fastest_worker_is_taken_then_the_lower_id() -> None:
    slow = replace(D0, fetch_s=0.03)
    fast = replace(D0, worker_id=WorkerId("decode-1"))
    local = chosen(slow, fast)
    assert local is not None
    assert local.worker_id == "decode-1"
    equal = chosen(fast, D0)
    assert equal is not None
    assert equal.worker_id == "decode-0"
    assert chosen() is None
