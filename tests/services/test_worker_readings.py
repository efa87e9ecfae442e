"""What workers' metrics show, from what they were told."""

from halfmoon_decode.readings import DecodeCounts, batch_readings
from halfmoon_prefill.readings import PrefillCounts
from halfmoon_runtime.distribution import Distribution
from halfmoon_runtime.readings import Labelled, by
from halfmoon_scheduling.decode_batch import DecodeBatch
from halfmoon_scheduling.pages import PageAllocator
from halfmoon_scheduling.testing import a_request


def test_what_workers_did_is_counted_by_what_it_was() -> None:
    prefill, decode = PrefillCounts(), DecodeCounts()
    prefill.ended("failed")
    prefill.ended("stopped")
    ended = prefill.readings()["halfmoon_prefill_requests_ended_total"][1]
    assert ended == by("result", {"done": 0, "failed": 1, "stopped": 1})
    decode.step(0.5, 3)
    decode.produced(3)
    decode.gave_up("preempted")
    told = decode.readings()
    step_s, rows = (
        told[f"halfmoon_decode_{name}"][1] for name in ("step_seconds", "batch_requests")
    )
    assert isinstance(step_s, Distribution)
    assert isinstance(rows, Distribution)
    assert (step_s.sum, rows.sum) == (0.5, 3)
    assert told["halfmoon_decode_tokens_total"][1] == 3
    given_up = told["halfmoon_decode_given_up_total"][1]
    assert isinstance(given_up, Labelled)
    assert {why for (why,), n in given_up.values.items() if n} == {"preempted"}


def test_pages_of_a_decode_worker_are_in_one_state_each() -> None:
    pages = PageAllocator(16)
    batch = DecodeBatch(pages, block_size=16, max_running=4, max_context=4096, landing_ttl_s=60.0)
    request = a_request(n_tokens=40)
    batch.reserve(request.request_id, 40, request.stopping, 0.0)
    shown = batch_readings(batch, pages)["halfmoon_pages"][1]
    assert shown == by("state", {"free": 13, "used": 0, "landing": 3, "aside": 0})
