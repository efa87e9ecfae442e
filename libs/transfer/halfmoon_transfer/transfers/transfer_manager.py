"""Admit transfers, perform the commands of their plans, and end them.

    start -> plan -> ResolvePeer    -> PathRouter.known_paths, or a look-up in a thread -> plan
                  -> CarryBatch     -> PathRouter.carry in a thread -> outcomes         -> plan
                  -> FinishTransfer -> the waiters

The plan decides which peer, path and try comes next; this module decides which thread does it.
"""

import itertools
import threading
from collections.abc import Callable, Sequence

from halfmoon_transfer.backends.backend_interface import EngineContext, same_outcome_for_all
from halfmoon_transfer.interface import Cancelled, Op, Overloaded, Piece, TransferError
from halfmoon_transfer.planning.transfer_plan import (
    Batch,
    CarryBatch,
    FinishTransfer,
    OutcomeKind,
    OutgoingNotification,
    PeerKey,
    PlanCommand,
    PlanLimits,
    ResolvePeer,
    SliceOutcome,
    TransferPlan,
)
from halfmoon_transfer.transfers.engine_threads import EngineThreads, Watcher
from halfmoon_transfer.transfers.live_transfer import LiveTransfer
from halfmoon_transfer.transfers.path_router import PathRouter
from halfmoon_transfer.transfers.request_checks import check_request
from halfmoon_transfer.transfers.transfer_stats import (
    TransferCounters,
    applied_bytes,
    corrupted_slices,
)


class TransferManager:
    """The live transfers of one engine. All methods are safe from any thread."""

    def __init__(
        self,
        context: EngineContext,
        router: PathRouter,
        counters: TransferCounters,
        threads: EngineThreads,
    ) -> None:
        """Start the threads.

        Args:
            context: its name, regions and settings.
            router: carries batches.
            counters: counts the transfers that end.
            threads: makes them, and tells the time.
        """
        settings = context.settings
        self._context = context
        self._router = router
        self._counters = counters
        self._limits = PlanLimits(
            settings.batch_bytes, settings.batch_slices, settings.tries_per_path
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._now = threads.now
        self._threads = threads
        #: Whether writes may begin just now; None: always.
        self.may_write: Callable[[], bool] | None = None
        #: Submitted and not done, in that order.
        self._live: dict[LiveTransfer, None] = {}
        self._all_done = threading.Condition(self._lock)
        self._is_closing = False
        label = f"halfmoon-transfer-{context.name}"
        self._pool = threads.open_pool(label, threads=settings.threads, lanes=settings.lanes)
        self._deadlines: Watcher[LiveTransfer] = threads.watch_deadlines(
            f"{label}-deadlines", _on_overdue
        )

    def __len__(self) -> int:
        return len(self._live)

    def start(
        self,
        op: Op,
        pieces: Sequence[Piece],
        deadline_s: float,
        notification: OutgoingNotification | None,
        carrier: int | None = None,
        *,
        checksums: bool = True,
        verify: bool = False,
    ) -> LiveTransfer:
        """Start a transfer; a request that is refused returns as a failed one.

        Args:
            op: the direction of the bytes.
            pieces: what to move.
            deadline_s: seconds from now to the end, at the latest.
            notification: for each peer, after the bytes.
            carrier: the caller's thread, if it waits for the transfer and may carry meanwhile.
            checksums: whether bytes that cross a wire carry checksums.
            verify: whether copies in memory are compared, too.
        """
        plan = TransferPlan(
            next(self._numbers),
            op,
            pieces,
            self._limits,
            notification,
            checksums=checksums,
            verify=verify,
        )
        transfer = LiveTransfer(
            plan,
            deadline_s=deadline_s,
            perform=self._perform,
            on_cancel=_on_cancel,
            now=self._now,
        )
        if op == "write":
            transfer.stop_signal.may_go_on = self.may_write
        error = self._admit(transfer) or check_request(op, pieces, self._context)
        if error is not None:
            transfer.stop(error)
            return transfer
        # With several peers the caller's thread would delay the others for the first one.
        transfer.carrier = carrier if plan.n_peers == 1 else None
        self._deadlines.watch(transfer)
        transfer.begin()
        return transfer

    def _admit(self, transfer: LiveTransfer) -> TransferError | None:
        with self._lock:
            n_live = len(self._live)
            self._live[transfer] = None
            if self._is_closing:
                return Cancelled(f"the transfer engine of segment {self._context.name} is closed")
        if n_live >= self._context.settings.max_live:
            return Overloaded(f"{n_live} transfers are live, the limit; wait for some to end")
        return None

    def _perform(self, transfer: LiveTransfer, command: PlanCommand) -> None:
        match command:
            case ResolvePeer(peer=peer, fresh=fresh):
                paths = self._router.known_paths(peer, fresh=fresh)
                if paths is not None:
                    transfer.on_resolved(peer, paths, moved=False)
                else:
                    self._pool.submit(
                        peer.segment, lambda: self._look_up(transfer, peer, fresh=fresh)
                    )
            case CarryBatch(batch=batch):
                self._dispatch(transfer, batch)
            case FinishTransfer(error=error):
                self._finish(transfer, error)

    def _look_up(self, transfer: LiveTransfer, peer: PeerKey, *, fresh: bool) -> None:
        try:
            paths, moved = self._router.look_up_paths(peer, fresh=fresh)
        except TransferError as error:
            transfer.on_unresolved(peer, error)
        else:
            transfer.on_resolved(peer, paths, moved=moved)

    def _dispatch(self, transfer: LiveTransfer, batch: Batch) -> None:
        """Carry a batch in this thread, if it is the waiting caller's, or in the pool."""

        def job() -> None:
            if transfer.take(batch.number):
                outcomes = self._carry(transfer, batch)
                self._counters.on_carried(batch.path, batch.op, applied_bytes(batch, outcomes))
                self._counters.on_corrupted(batch.path, corrupted_slices(outcomes))
                transfer.on_carried(batch.number, outcomes)

        here = transfer.carrier == threading.get_ident() and transfer.is_last_queued(batch)
        if here:
            # Only one batch: later ones, such as retries of slices, go to the pool.
            transfer.carrier = None
        if not (here and self._pool.try_run_inline(batch.peer.segment, job)):
            self._pool.submit(batch.peer.segment, job)

    def _carry(self, transfer: LiveTransfer, batch: Batch) -> Sequence[SliceOutcome]:
        unreachable = transfer.unreachable(batch)
        if unreachable is not None:
            return [unreachable] * len(batch.slices)
        stop = transfer.stop_signal
        if stop.is_held and not self._threads.wait_while_held(stop):
            return same_outcome_for_all(batch, OutcomeKind.LOST, "this engine's writes are held")
        return self._router.carry(batch, stop)

    def _finish(self, transfer: LiveTransfer, error: TransferError | None) -> None:
        plan = transfer.plan
        self._deadlines.forget(transfer)
        if error is None:
            self._counters.on_done(plan.op, plan.n_bytes, plan.n_retries)
        else:
            self._counters.on_failed(plan.n_retries)
        with self._lock:
            self._live.pop(transfer, None)
            if not self._live:
                self._all_done.notify_all()
        transfer.finish(error)

    def stop_admitting(self) -> bool:
        """Refuse new transfers; return False if they were refused already."""
        with self._lock:
            refused, self._is_closing = self._is_closing, True
        return not refused

    def close(self) -> None:
        """End those that are live with `Cancelled`, and the threads; after `stop_admitting`."""
        with self._lock:
            live = list(self._live)
        for transfer in live:
            transfer.stop(
                Cancelled(f"the transfer engine of segment {self._context.name} was closed")
            )
        with self._all_done:
            self._all_done.wait_for(lambda: not self._live)
        self._pool.close()
        self._deadlines.close()

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._pool.check()
        with self._lock:
            assert not any(transfer.done() for transfer in self._live), "done and still live"


def _on_cancel(transfer: LiveTransfer) -> None:
    transfer.stop(Cancelled(f"{transfer.plan.op} of {transfer.plan.n_bytes} bytes, cancelled"))


def _on_overdue(transfer: LiveTransfer) -> None:
    transfer.stop(transfer.timeout_error())
