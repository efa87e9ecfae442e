"""What workers' metrics show, from what they were told."""

from halfmoon_runtime.observability.histogram import FastHistogram
from halfmoon_runtime.observability.metrics import LabelledValues, by_label
from halfmoon_scheduling.decode.decode_batch import DecodeBatch
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_testing.scheduling_inputs import a_request
from halfmoon_workers.decode.decode_metrics import DecodeCounts, batch_metrics
from halfmoon_workers.prefill.prefill_metrics import PrefillCounts


def test_what_workers_did_is_counted_by_what_it_was() -> None:
    prefill, decode = PrefillCounts(), DecodeCounts()
    prefill.ended("failed")
    prefill.ended("stopped")
    ended = prefill.metrics()["halfmoon_prefill_requests_ended_total"][1]
    assert ended == by_label("result", {"done": 0, "failed": 1, "stopped": 1})
    decode.on_step(0.5, 3)
    decode.on_tokens(3)
    decode.on_give_up("preempted")
    told = decode.metrics()
    step_s, rows = (
        told[f"halfmoon_decode_{name}"][1] for name in ("step_seconds", "batch_requests")
    )
    assert isinstance(step_s, FastHistogram)
    assert isinstance(rows, FastHistogram)
    assert (step_s.sum, rows.sum) == (0.5, 3)
    assert told["halfmoon_decode_tokens_total"][1] == 3
    given_up = told["halfmoon_decode_failures_total"][1]
    assert isinstance(given_up, LabelledValues)
    assert {why for (why,), n in given_up.values.items() if n} == {"preempted"}


def test_pages_of_a_decode_worker_are_in_one_state_each() -> None:
    pages = PageAllocator(16)
    batch = DecodeBatch(pages, block_size=16, max_running=4, max_context=4096, landing_ttl_s=60.0)
    request = a_request(n_tokens=40)
    batch.reserve(request.request_id, 40, request.stopping, 0.0)
    shown = batch_metrics(batch, pages)["halfmoon_pages"][1]
    assert shown == by_label("state", {"free": 13, "used": 0, "landing": 3, "aside": 0})
