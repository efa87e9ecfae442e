"""Run the forward passes that the prefill machine gives out, one after another, in one thread."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from halfmoon_engine.errors import EngineLost
from halfmoon_engine.interface import GrammarFailed, PendingToken, TokenResult
from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.worker.forward_thread import ForwardThread
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_scheduling.prefill.prefill_commands import PrefillPass, StagePass
from halfmoon_scheduling.prefill.prefill_events import (
    FirstToken,
    PassEnded,
    PassFailed,
    PrefillEvent,
    PrefillFailure,
    TokenDelayed,
)
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk
from halfmoon_workers.prefill.forward_pass import ForwardResult, PrefillForward
from halfmoon_workers.prefill.prefill_job import PrefillJob

log = structlog.get_logger()

#: Seconds to wait for delayed tokens at a time when there is nothing else to compute.
_DELAYED_WAIT_S = 0.02


class ForwardLoop:
    """Run passes while there are any, and post how each ended."""

    def __init__(
        self,
        machine: PrefillMachine,
        jobs: Mapping[RequestId, PrefillJob],
        forward: PrefillForward,
        watch: ForwardWatchdog,
        clock: Clock,
        post: Callable[[PrefillEvent], None],
        open_thread: Callable[[], ForwardThread] = ForwardThread,
    ) -> None:
        """Create a loop that runs nothing yet.

        Args:
            machine: gives out passes.
            jobs: of the requests in them.
            forward: runs a pass.
            watch: is told of each.
            clock: of the machine's times.
            post: hands the machine an event.
            open_thread: makes the thread that computes.
        """
        self._machine = machine
        self._jobs = jobs
        self._forward = forward
        self._watch = watch
        self._clock = clock
        self._post = post
        self._open_thread = open_thread
        #: First tokens that are delayed: what their grammars allow is not known yet.
        self._pending: dict[RequestId, PendingToken] = {}
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Look for a pass, if none is under way."""
        self._work.set()

    async def run(self) -> None:
        """Run passes until cancelled.

        Raises:
            EngineLost: no pass can be computed any more.
        """
        with self._open_thread() as thread:
            while True:
                if not await self.run_next(thread):
                    self._work.clear()
                    await self._work.wait()

    async def run_next(
        self, thread: ForwardThread, delayed_wait_s: float = _DELAYED_WAIT_S
    ) -> bool:
        """Run the pass that is due, if there is one; return whether there was.

        Args:
            thread: computes.
            delayed_wait_s: seconds to wait for delayed tokens when there is nothing to compute.

        Raises:
            EngineLost: no pass can be computed any more.
        """
        due = self._machine.next_pass(self._clock.now())
        if due is None:
            return False
        self._post(await self._run_pass(due, thread, delayed_wait_s))
        return True

    async def _run_pass(
        self, due: PrefillPass, thread: ForwardThread, delayed_wait_s: float
    ) -> PrefillEvent:
        batch = [(self._jobs[chunk.request_id], chunk) for chunk in due.chunks]
        pending = [
            (self._jobs[request_id], self._pending.pop(request_id)) for request_id in due.delayed
        ]
        try:
            result, finished = await thread.run(
                self._watch.run, self._compute, batch, pending, delayed_wait_s, due.stage
            )
        except EngineLost:
            raise
        except Exception as error:
            log.exception("forward_failed", n_requests=len(batch))
            return PassFailed(str(error))
        tokens: dict[RequestId, FirstToken] = {}
        for chunk, chosen in zip(due.chunks, result.tokens, strict=True):
            if chosen is not None:
                tokens[chunk.request_id] = self._first_token(chunk.request_id, chosen)
        for request_id, chosen in zip(due.delayed, finished, strict=True):
            tokens[request_id] = self._first_token(request_id, chosen)
        return PassEnded(tokens, result.compute_s, result.layers_wait_s)

    def _compute(
        self,
        batch: Sequence[tuple[PrefillJob, PrefillChunk]],
        pending: Sequence[tuple[PrefillJob, PendingToken]],
        delayed_wait_s: float,
        stage: StagePass | None,
    ) -> tuple[ForwardResult, list[TokenResult]]:
        """Run a batch, and choose what earlier passes left open; in the forward's thread."""
        result = self._forward(batch, stage) if batch else ForwardResult()
        wait_s = 0.0 if batch else delayed_wait_s
        return result, self._forward.finish(pending, wait_s)

    def _first_token(self, request_id: RequestId, chosen: TokenResult) -> FirstToken:
        """Say in the machine's terms what the engine chose for a request."""
        if isinstance(chosen, PendingToken):
            self._pending[request_id] = chosen
            return TokenDelayed()
        if isinstance(chosen, GrammarFailed):
            return PrefillFailure(
                chosen.reason,
                retryable=chosen.retryable,
                invalid=chosen.invalid,
                code=error_codes.GRAMMAR_FAILED,
            )
        return chosen
