"""Drive a submitted transfer by its plan, and let its caller wait for it.

The caller's half is the contract of `Transfer`: wait, poll, cancel, from threads or asyncio. The
engine's half keeps the plan under a lock and passes the plan's commands on to be performed.
"""

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
        now: Callable[[], float],
    ) -> None:
        self._now = now
        self._started = now()
        self.plan = plan
        self.stop_signal = StopSignal(self._started + deadline_s, now)
        self.deadline_s = deadline_s
        self._perform = perform
        self._on_cancel = on_cancel
        #: The caller's thread, if it waits anyway: it carries one batch itself.
        self.carrier: int | None = None
        self._future: Future[Report] = Future()
        #: Batches of the plan that no thread has taken yet.
        self._queued: dict[int, Batch] = {}
        # Guards the plan and `_queued`; commands are performed outside of it.
        self._lock = Lock()

    # For the caller.

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Report:
        """Wait, from a thread.

        Raises:
            TransferError: it failed. `TimedOut` also after `timeout_s`; the transfer goes on.
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

    # For the engine.

    @property
    def deadline(self) -> float:
        """Deadline on the monotonic clock."""
        return self.stop_signal.deadline

    def begin(self) -> None:
        """Start, and perform the first commands."""
        self._handle(self.plan.begin)

    def on_resolved(self, key: PeerKey, paths: tuple[TransferPath, ...], *, moved: bool) -> None:
        """Continue with the paths to a peer."""
        self._handle(lambda: self.plan.on_resolved(key, paths, moved=moved))

    def on_unresolved(self, key: PeerKey, error: TransferError) -> None:
        """Continue after a peer was not found."""
        self._handle(lambda: self.plan.on_unresolved(key, error))

    def on_carried(self, number: int, outcomes: Sequence[SliceOutcome]) -> None:
        """Continue with the outcomes of a batch."""
        self._handle(lambda: self.plan.on_carried(number, outcomes))

    def is_last_queued(self, batch: Batch) -> bool:
        """Return whether no later batch waits to be carried."""
        with self._lock:
            return max(self._queued, default=-1) == batch.number

    def take(self, number: int) -> bool:
        """Take a batch to carry it; return False if it was taken or dropped already."""
        with self._lock:
            return self._queued.pop(number, None) is not None

    def unreachable(self, batch: Batch) -> SliceOutcome | None:
        """Return the outcome of a batch whose path is known to be unreachable; else None."""
        with self._lock:
            return self.plan.unreachable(batch)

    def stop(self, error: TransferError) -> None:
        """End with this error as soon as no thread accesses the local memory."""
        self._handle(lambda: self.plan.stop(error))

    def timeout_error(self) -> TimedOut:
        """Return the error for a deadline that has passed."""
        plan, doing = self.plan, self.stop_signal.doing
        text = f"{plan.op} of {plan.n_bytes} bytes not done after {self.deadline_s} s"
        with self._lock:
            failures = plan.last_failure()
        return TimedOut("; ".join(part for part in (text, doing, failures) if part))

    def finish(self, error: TransferError | None) -> None:
        """Set the result; called once, as the plan commands `FinishTransfer` once."""
        if error is not None:
            self._future.set_exception(error)
            return
        plan = self.plan
        self._future.set_result(
            Report(
                n_bytes=plan.n_bytes,
                seconds=self._now() - self._started,
                path=tuple(plan.paths_used),
                retries=plan.n_retries,
            )
        )

    def _handle(self, event: Callable[[], list[PlanCommand]]) -> None:
        with self._lock:
            commands = event()
            for command in commands:
                if isinstance(command, CarryBatch):
                    self._queued[command.batch.number] = command.batch
            is_failing = self.plan.is_failing and not self.stop_signal.stopped
        for command in commands:
            self._perform(self, command)
        if is_failing:
            self._stop_carrying()

    def _stop_carrying(self) -> None:
        """Stop a failing transfer: wake the carrying threads, and drop queued batches.

        A queued batch may wait behind a peer that hangs.
        """
        self.stop_signal.set()
        with self._lock:
            queued = list(self._queued.values())
            self._queued.clear()
        for batch in queued:
            self.on_carried(batch.number, same_outcome_for_all(batch, OutcomeKind.LOST, "stopped"))
