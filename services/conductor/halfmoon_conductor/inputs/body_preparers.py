"""Prepare bodies in child processes, within limits of time and memory.

A child is ended at once when its client is gone. Where there are none, as in tests, a thread
does the work.
"""

import asyncio
from typing import Protocol

import msgspec
import structlog

from halfmoon_conductor.errors import RequestTooCostly, ServiceUnavailable
from halfmoon_conductor.fair_gate import FairGate
from halfmoon_conductor.inputs.body_preparation import BodyPreparation
from halfmoon_conductor.inputs.preparation_messages import (
    PreparationJob,
    PreparationOutcome,
    PreparationRefused,
    PreparedAnswer,
    PreparedBody,
    decode_outcome,
    encode_job,
)
from halfmoon_sandbox import ChildPool, ChildUnavailable, HandlerFailed, LimitExceeded, Sandbox

#: Address space of one child beyond what all children share.
MEMORY_BYTES = 1024 * 1024 * 1024
#: Larger bodies leave one child free for smaller ones.
_LARGE_BYTES = 256 * 1024
_MIB = 1024 * 1024
_RETRY_S = 1.0

_log = structlog.get_logger(__name__)


class PreparationBudget(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds allowed for one body: ten times what ordinary text takes."""

    base_s: float = 2.0
    per_mib_s: float = 1.5
    per_token_s: float = 1e-5

    def of(self, job: PreparationJob) -> float:
        """Return the budget of a body: at most what a full context of ordinary text needs."""
        by_bytes = self.per_mib_s * len(job.content) / _MIB
        return self.base_s + min(by_bytes, self.per_token_s * job.card.max_context)


class BodyPreparer(Protocol):
    """Prepare bodies."""

    async def prepare(self, job: PreparationJob, tenant: str = "") -> PreparedBody | PreparedAnswer:
        """Prepare a body. Cancelling ends the work.

        Args:
            job: the body.
            tenant: whose it is; tenants take turns.

        Raises:
            InvalidRequest: the body is not valid.
            RequestTooCostly: it takes too much time or memory.
            ServiceUnavailable: there is no child process.
        """
        ...


class ThreadPreparer:
    """Prepare bodies in a thread of this process, without limits."""

    def __init__(self, preparation: BodyPreparation) -> None:
        self._preparation = preparation

    async def prepare(self, job: PreparationJob, tenant: str = "") -> PreparedBody | PreparedAnswer:
        """Prepare a body; see `BodyPreparer.prepare`."""
        return _checked(await asyncio.to_thread(self._preparation.outcome, job))


class ProcessPreparer:
    """Prepare bodies in the children of a sandbox, several at once; `close` ends them.

    Args:
        sandbox: runs `body_preparation.make_handler`.
        n_helpers: children at work at once, at least 2.
        budget: CPU time of each body.
    """

    def __init__(
        self, sandbox: Sandbox, n_helpers: int, budget: PreparationBudget | None = None
    ) -> None:
        self._pool = ChildPool(sandbox)
        self._budget = budget or PreparationBudget()
        self._places = FairGate(n_helpers, credit=_MIB)
        self._large_places = FairGate(n_helpers - 1, credit=_MIB)

    @property
    def pids(self) -> list[int]:
        """Process ids of idle children."""
        return [child.pid for child, _ in self._pool.idle]

    async def prepare(self, job: PreparationJob, tenant: str = "") -> PreparedBody | PreparedAnswer:
        """Prepare a body; see `BodyPreparer.prepare`."""
        if len(job.content) <= _LARGE_BYTES:
            return await self._in_turn(job, tenant)
        async with self._large_places.place(tenant, len(job.content)):
            return await self._in_turn(job, tenant)

    def start(self) -> None:
        """Start the process that children are forked from, so that no request waits for it."""
        self._pool.start()

    def wait_ready(self) -> None:
        """Wait until that process has loaded the tokenizer. Blocks.

        Raises:
            ChildUnavailable: it can't; the text says why.
        """
        self._pool.sandbox.wait_ready()

    def close(self) -> None:
        """End all children."""
        self._pool.close()

    async def _in_turn(self, job: PreparationJob, tenant: str) -> PreparedBody | PreparedAnswer:
        async with self._places.place(tenant, len(job.content) + 1):
            try:
                content = await self._pool.call(
                    encode_job(job),
                    cpu_s=self._budget.of(job),
                    # A child that prepared a large body would keep its memory.
                    reuse=len(job.content) <= _LARGE_BYTES,
                )
            except LimitExceeded as error:
                _log.warning("helper ended", limit=error.limit, n_bytes=len(job.content))
                raise RequestTooCostly(
                    f"This request takes more time or memory to read than one may: {error}. "
                    "Shorten it, or send token ids."
                ) from None
            except HandlerFailed as error:
                raise RuntimeError(f"a helper failed: {error}") from None
            except ChildUnavailable as error:
                _log.error("no helper", reason=str(error))
                raise ServiceUnavailable(
                    "No helper is there to read this request.", _RETRY_S
                ) from None
        return _checked(decode_outcome(content))


def _checked(outcome: PreparationOutcome) -> PreparedBody | PreparedAnswer:
    if isinstance(outcome, PreparationRefused):
        raise outcome.error()
    return outcome
