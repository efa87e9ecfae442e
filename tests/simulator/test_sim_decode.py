"""A simulated decode worker alone, told things at chosen moments. A step takes a second."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    DecodeCost,
    DecodeFailed,
    DecodeReserved,
    ReserveDecode,
    StartDecode,
)
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_decode import SimDecode
from halfmoon_simulator.cluster.sim_prefill import STOP_TOKEN_ID
from halfmoon_simulator.results.token_intervals import TokenIntervals
from halfmoon_testing.simulator_inputs import tiny_costs

D0 = WorkerId("decode-0")
A, B = RequestId("a"), RequestId("b")
N_PAGES = 20
STOPPING = Stopping(max_new_tokens=40, stop_token_ids=(STOP_TOKEN_ID,))


class Bench:
    """The worker, its clock, and what it said."""

    def __init__(self, n_output: int = 5, decode: DecodeCost | None = None, **spec: Any) -> None:
        self.event_queue = EventQueue()
        self.said: list[tuple[WorkerId, AnyMessage]] = []
        self.finished: dict[RequestId, float] = {}
        costs = tiny_costs() if decode is None else tiny_costs(decode=decode)
        self.worker = SimDecode(
            D0,
            "host-d0",
            ClusterSpec(block_tokens=16, n_pages=N_PAGES, **spec),
            costs,
            self.event_queue,
            NetworkModel(self.event_queue, network_bytes_per_s=1e15, local_bytes_per_s=1e15),
            kvstores=lambda _: None,
            n_output=lambda _: n_output,
            answer=lambda worker_id, message: self.said.append((worker_id, message)),
            finished=self._finish,
            interrupted=lambda request_id, n_tokens, intervals: None,
        )

    def _finish(self, request_id: RequestId, intervals: TokenIntervals) -> None:
        self.finished[request_id] = self.event_queue.now

    def tell(self, at_s: float, message: AnyMessage) -> None:
        self.event_queue.at(at_s, self.worker.receive, message)

    def reserve(self, request_id: RequestId, at_s: float = 0.0) -> None:
        self.tell(at_s, ReserveDecode(request_id=request_id, n_tokens=20, stopping=STOPPING))

    def decode(self, request_id: RequestId, at_s: float = 0.0) -> None:
        self.reserve(request_id, at_s)
        what = {"sampling": Sampling(temperature=0.0), "stopping": STOPPING, "n_prompt": 20}
        self.tell(at_s, StartDecode(request_id=request_id, first_token=0, **what))  # type: ignore[arg-type]

    def expired_pages(self, at_s: float) -> int:
        """Free pages at that time, once what ran out is given back."""
        self.run_until(at_s)
        self.worker.expire()
        return self.worker.load().free_pages

    def run_until(self, at_s: float) -> None:
        """All that happens up to then, and at that very moment."""
        reached: list[bool] = []
        self.event_queue.at(at_s + 1e-6, reached.append, True)
        while not reached:
            assert self.event_queue.step()
            self.worker.check()


def test_a_request_that_comes_as_a_step_begins_waits_for_its_end() -> None:
    bench = Bench(n_output=3)
    bench.decode(A)
    bench.decode(B)
    bench.run_until(9.0)
    assert bench.finished == {A: 2.0, B: 3.0}


def test_who_is_cancelled_while_decoding_leaves_with_the_step_under_way() -> None:
    bench = Bench(n_output=9)
    bench.decode(A)
    bench.decode(B)
    bench.tell(2.5, Cancel(request_id=A))
    bench.run_until(2.9)
    assert bench.worker.load().n_running == 2
    bench.run_until(3.0)
    assert bench.worker.load().n_running == 1
    assert bench.worker.load().free_pages == N_PAGES - 2
    bench.run_until(9.0)
    assert bench.finished == {B: 9.0}
    assert bench.worker.load().free_pages == N_PAGES


@pytest.mark.parametrize("in_doubt", [False, True])
def test_the_pages_of_a_landing_in_doubt_rest_for_a_while(in_doubt: bool) -> None:
    bench = Bench(quarantine_s=2.0)
    bench.reserve(A)
    bench.tell(1.0, Cancel(request_id=A, landing_in_doubt=in_doubt))
    assert bench.expired_pages(2.9) == N_PAGES - 2 * in_doubt
    assert bench.expired_pages(3.0) == N_PAGES


def test_who_is_cancelled_before_its_start_took_effect_is_not_decoded() -> None:
    bench = Bench()
    bench.decode(A)
    bench.decode(B, 1.2)
    bench.tell(1.5, Cancel(request_id=B))
    bench.run_until(9.0)
    assert bench.finished == {A: 4.0}
    assert [type(message) for _, message in bench.said] == [DecodeReserved, DecodeReserved]


def test_a_landing_that_nobody_starts_in_time_is_given_up_and_said_so() -> None:
    bench = Bench(landing_ttl_s=3.0)
    bench.reserve(A)
    assert bench.expired_pages(3.0) == N_PAGES
    worker_id, message = bench.said[-1]
    assert isinstance(message, DecodeFailed)
    assert (worker_id, message.request_id, message.retryable) == (D0, A, True)


def test_reported_steps_are_a_running_mean_of_those_of_late() -> None:
    bench = Bench(n_output=9, decode=DecodeCost(d0_s=1.0, d1_s=1.0, d2_s=0.0))
    assert (bench.worker.load().step_s, bench.worker.step_s) == (0.0, 0.0)
    bench.decode(A)
    bench.decode(B, 3.0)
    bench.run_until(4.0)
    assert (bench.worker.load().step_s, bench.worker.step_s) == (2.0, 3.0)
    bench.run_until(10.5)  # two steps of both, and a third under way
    assert bench.worker.load().step_s == pytest.approx(2.0 + (1 - 0.8**2) * 1.0)
    bench.run_until(19.0)  # five steps of both; with the next one the first is over
    assert bench.worker.load().step_s == pytest.approx(2.0 + (1 - 0.8**5) * 1.0)
    assert (bench.worker.busy_s, bench.worker.n_steps) == (19.0, 7)


def test_a_load_counts_the_context_of_steps_that_are_over() -> None:
    bench = Bench(n_output=9)
    bench.decode(A)
    for at_s, n_tokens in ((0.5, 21), (2.5, 23)):
        bench.run_until(at_s)
        assert bench.worker.load().context_tokens == n_tokens
