"""A submitted transfer, as its caller holds it and as the engine drives it.

The caller's half is `Transfer`'s contract: wait, poll, cancel, from threads or asyncio. The
engine's half keeps the plan under a lock and passes its commands on to be performed.
"""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Lock

from halfmoon_transfer.backends.backend_interface import same_outcome_for_all
from halfmoon_transfer.interface import Report, TimedOut, Transfer, TransferError
from halfmoon_transfer.planning.transfer_plan import (
    Batch,
    CarryBatch,
    OutcomeKind,
    PeerKey,
    PlanCommand,
    SliceOutcome,
    TransferPath,
    TransferPlan,
)
from halfmoon_transfer.threads.future_await import await_future
from halfmoon_transfer.threads.stop_signal import StopSignal

Perform = Callable[["LiveTransfer", PlanCommand], None]


class LiveTransfer(Transfer):
    """One transfer from submission to its end."""

    def __init__(
        self,
        plan: TransferPlan,
        *,
        deadline_s: float,
        perform: Perform,
        on_cancel: Callable[["LiveTransfer"], None],
    ) -> None:
        self._started = time.monotonic()
        self.plan = plan
        self.stop_signal = StopSignal(self._started + deadline_s)
        self.deadline_s = deadline_s
        self._perform = perform
        self._on_cancel = on_cancel
        #: The thread that will carry one batch itself, as it is going to wait anyway.
        self.carrier: int | None = None
        self._future: Future[Report] = Future()
        #: Batches that the plan gave out and no courier has taken yet.
        self._queued: dict[int, Batch] = {}
        # Guards the plan and `_queued`; commands are performed outside of it.
        self._lock = Lock()

    # The caller's half.

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Report:
        """Wait, from a thread.

        Raises:
            TransferError: it failed; `TimedOut` also when `timeout_s` passed (it goes on).
        """
        try:
            return self._future.result(timeout_s)
        except FutureTimeout:
            raise TimedOut(f"not done after {timeout_s} s of waiting; it goes on") from None

    def cancel(self) -> None:
        """Ask it to stop; it ends with `Cancelled` unless it was done."""
        self._on_cancel(self)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call this once it is done, from a thread of the engine (or at once)."""
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[object, None, Report]:
        """Wait, from asyncio; raises like `result`. Cancelling the waiter doesn't cancel it."""
        return await_future(self._future)

    # The engine's half.

    @property
    def deadline(self) -> float:
        """On the monotonic clock."""
        return self.stop_signal.deadline

    def begin(self) -> None:
        """Start; performs the first commands."""
        self._feed(self.plan.begin)

    def on_resolved(self, key: PeerKey, paths: tuple[TransferPath, ...], *, moved: bool) -> None:
        """A peer is reached over these paths."""
        self._feed(lambda: self.plan.on_resolved(key, paths, moved=moved))

    def on_unresolved(self, key: PeerKey, error: TransferError) -> None:
        """A peer can't be reached at all."""
        self._feed(lambda: self.plan.on_unresolved(key, error))

    def on_carried(self, number: int, outcomes: Sequence[SliceOutcome]) -> None:
        """A batch is back."""
        self._feed(lambda: self.plan.on_carried(number, outcomes))

    def is_last_queued(self, batch: Batch) -> bool:
        """Whether no batch that was given out after this one is to be carried."""
        with self._lock:
            return max(self._queued, default=-1) == batch.number

    def take(self, number: int) -> bool:
        """Whether this batch is still to be carried; from now on it is in the taker's hands."""
        with self._lock:
            return self._queued.pop(number, None) is not None

    def unreachable(self, batch: Batch) -> SliceOutcome | None:
        """Why there is no use in carrying a batch that was taken, if there is none."""
        with self._lock:
            return self.plan.unreachable(batch)

    def stop(self, error: TransferError) -> None:
        """End with this error as soon as its memory is left alone."""
        self._feed(lambda: self.plan.stop(error))

    def timeout_error(self) -> TimedOut:
        """The error for a deadline that passed now."""
        plan, doing = self.plan, self.stop_signal.doing
        text = f"{plan.op} of {plan.n_bytes} bytes not done after {self.deadline_s} s"
        with self._lock:
            failures = plan.last_failure()
        return TimedOut("; ".join(part for part in (text, doing, failures) if part))

    def finish(self, error: TransferError | None) -> None:
        """Tell the waiters; done once, as the plan says `Finish` once."""
        if error is not None:
            self._future.set_exception(error)
            return
        plan = self.plan
        self._future.set_result(
            Report(
                n_bytes=plan.n_bytes,
                seconds=time.monotonic() - self._started,
                path=tuple(plan.paths_used),
                retries=plan.n_retries,
            )
        )

    def _feed(self, event: Callable[[], list[PlanCommand]]) -> None:
        with self._lock:
            commands = event()
            for command in commands:
                if isinstance(command, CarryBatch):
                    self._queued[command.batch.number] = command.batch
            wind_down = self.plan.is_failing and not self.stop_signal.stopped
        for command in commands:
            self._perform(self, command)
        if wind_down:
            self._wind_down()

    def _wind_down(self) -> None:
        """It will fail: wake whoever carries, and don't wait for what nobody has taken.

        A batch that is queued may stand in line behind a peer that hangs.
        """
        self.stop_signal.set()
        with self._lock:
            queued = list(self._queued.values())
            self._queued.clear()
        for batch in queued:
            self.on_carried(batch.number, same_outcome_for_all(batch, OutcomeKind.LOST, "stopped"))
