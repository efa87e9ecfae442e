"""The predicted wait is the time that a request takes in a real prefill queue."""

import random

import pytest

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.cluster.planned_queue import PlannedQueue
from halfmoon_scheduling.prefill import prefill_queue
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue

A, B = RequestId("a"), RequestId("b")
#: Tokens of a pass; a token takes a second.
PASS = 8


class Worker:
    """A prefill worker that computes its queue, beside the conductor's prediction of it."""

    def __init__(self) -> None:
        self.real = PrefillQueue(chunk_tokens=PASS, max_requests=1000)
        self.predicted = PlannedQueue()
        self.now = 0.0
        #: When the pass under way ends; its chunks are those of the queue at its start.
        self.pass_ends_s = 0.0
        self.chunks = self.real.next_batch()
        #: Requests that paused another one.
        self.n_paused = 0
        self.ended_s: dict[RequestId, float] = {}

    def push(self, request_id: RequestId, n_tokens: int, priority: int) -> float:
        """Queue a request; return when it should end."""
        queue = self.predicted
        wait_s = queue.behind_s(priority) + max(0.0, queue.head_ends_s(priority) - self.now)
        self.real.push(request_id, n_tokens=n_tokens, n_cached=0, priority=priority)
        queue.add(request_id, float(n_tokens), priority, self.now)
        queue.check()
        self.n_paused += queue.is_first(request_id) and len(self.real) > 1
        self.run_until(self.now)
        return self.now + wait_s + n_tokens

    def run_until(self, now: float) -> None:
        """Compute passes; the conductor learns at once that a request is done."""
        while self.chunks or self.real.next_batch():
            if not self.chunks:
                self.chunks = self.real.next_batch()
                self.pass_ends_s = self.now + sum(chunk.n_tokens for chunk in self.chunks)
            if self.pass_ends_s > now:
                break
            self.now = self.pass_ends_s
            self.real.advance(self.chunks)
            for chunk in self.chunks:
                if chunk.last:
                    self.predicted.remove(chunk.request_id, self.now)
                    self.predicted.check()
                    self.ended_s[chunk.request_id] = self.now
            self.chunks = []
        self.now = max(self.now, now) if self.chunks else now


@pytest.mark.random_seeds(40)
def test_the_last_request_ends_when_it_is_predicted_to(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which overtaken requests go first after all is not predicted.
    monkeypatch.setattr(prefill_queue, "OVERTAKEN_PASSES", 1_000_000)
    dice = random.Random(seed)
    priorities = dice.choice(((0,), (0, 1), (-2, 0, 5)))
    worker = Worker()
    n_requests = dice.randint(2, 12)
    for i in range(n_requests):
        priority = dice.choice(priorities)
        ends_s = worker.push(RequestId(f"r{i}"), dice.randint(1, 40 * PASS), priority)
        if i < n_requests - 1:
            worker.run_until(worker.now + dice.choice((0.0, 3.0, 20.0, 400.0)))
    worker.run_until(1e9)
    # It ends with the pass that it shares, and comes during another one, as does each pause.
    error = PASS * (2 + worker.n_paused)
    ended_s = worker.ended_s[RequestId(f"r{n_requests - 1}")]
    assert ended_s == pytest.approx(ends_s, abs=error)
    assert worker.predicted.behind_s() == 0.0
    worker.predicted.check()


def test_a_paused_request_keeps_what_it_has_run() -> None:
    queue = PlannedQueue()
    queue.add(A, 100.0, 0, 0.0)
    queue.add(B, 10.0, 1, 30.0)
    assert (queue.behind_s(0), queue.head_ends_s(0)) == (70.0, 40.0)
    assert (queue.behind_s(1), queue.head_ends_s(1)) == (0.0, 40.0)
    assert (queue.behind_s(2), queue.head_ends_s(2)) == (0.0, float("-inf"))
    queue.remove(B, 40.0)
    assert (queue.behind_s(0), queue.head_ends_s(0)) == (0.0, 110.0)
    assert queue.is_first(A) and not queue.is_first(B)
    queue.check()
