import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.admission import MIN_RETRY_S, Refused, decide
from halfmoon_scheduling.placement import Estimate, Placement


def placement(queue_s: float, prefill_s: float, tbt_s: float = 0.05) -> Placement:
    row = Estimate(
        worker_id=WorkerId("prefill-0"),
        home=None,
        local_blocks=0,
        source=None,
        n_blocks=0,
        transfer_blocks=0,
        queue_s=queue_s,
        transfer_s=0.0,
        prefill_s=prefill_s,
    )
    return Placement(row, WorkerId("decode-0"), tbt_s, (row,))


def early(
    placed: Placement, ttft: float | None = None, tbt: float | None = None, waited_s: float = 0
) -> Refused | None:
    return decide("early", placed, ttft_slo_s=ttft, tbt_slo_s=tbt, waited_s=waited_s)


def test_with_mode_none_everybody_is_let_in() -> None:
    assert decide("none", placement(100, 100, 9), ttft_slo_s=1, tbt_slo_s=0.1) is None


def test_what_keeps_its_limits_is_let_in_and_the_limit_itself_is_kept() -> None:
    assert early(placement(2, 3, 0.05), ttft=5, tbt=0.05) is None
    assert early(placement(100, 100, 9)) is None


def test_a_late_first_token_is_refused_until_the_queue_is_short_enough() -> None:
    refused = early(placement(10, 3), ttft=8)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(5)
    assert "13 s at prefill-0 (queue 10 s), the limit is 8 s" in refused.reason


def test_if_an_empty_queue_would_not_help_the_whole_queue_is_waited_for() -> None:
    refused = early(placement(10, 30), ttft=8)
    assert refused is not None
    assert refused.retry_after_s == 10


def test_a_refused_client_waits_at_least_a_second() -> None:
    refused = early(placement(0.5, 1), ttft=1.2)
    assert refused is not None
    assert refused.retry_after_s == MIN_RETRY_S


def test_time_spent_waiting_counts() -> None:
    assert early(placement(2, 3), ttft=6, waited_s=0.5) is None
    assert early(placement(2, 3), ttft=6, waited_s=1.5) is not None


def test_slow_tokens_are_refused() -> None:
    refused = early(placement(0, 1, tbt_s=0.2), tbt=0.1)
    assert refused is not None
    assert "0.2 s at decode-0, the limit is 0.1 s" in refused.reason
    assert refused.retry_after_s >= 1
