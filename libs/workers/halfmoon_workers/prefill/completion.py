"""Wait for the end of a request's bytes: all acknowledged and verified."""

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure
from halfmoon_transfer.interface import TransferError
from halfmoon_workers.prefill.prefill_job import PrefillJob
from halfmoon_workers.prefill.prefill_refusal import PrefillRefused
from halfmoon_workers.prefill.prefix_cache_client import CorruptBlock, PrefixCacheClient


async def await_completion(job: PrefillJob, caching: PrefixCacheClient) -> None:
    """Wait for the landing's acknowledgements and verify what was fetched.

    Raises:
        PrefillRefused: some KV did not arrive, or did not arrive as it was stored.
    """
    decode = WorkerId(job.start.landing.region.segment)
    try:
        for load in job.loads:
            await load
        await caching.verify(job)
    except (TransferError, CorruptBlock) as error:
        raise PrefillRefused(fetch_failure(job, error)) from None
    if job.failure is not None:
        raise PrefillRefused(PrefillFailure(str(job.failure), retryable=True))
    try:
        for write in job.landing_writes:
            await write
    except TransferError as error:
        reason = f"KV did not reach {decode}: {error}"
        failure = PrefillFailure(reason, retryable=True, culprit=decode)
        raise PrefillRefused(failure) from None


def fetch_failure(job: PrefillJob, error: Exception) -> PrefillFailure:
    """Return the failure of a request whose cached blocks did not come, or came damaged."""
    # The lease of this moment: another replica may have taken over.
    source = job.lease.address.worker_id if job.lease else None
    if job.order is not None and job.order.cached is not None:
        source = WorkerId(job.order.cached.region.segment)  # stage 0 has leased them there
    return PrefillFailure(f"cached blocks are of no use: {error}", retryable=True, culprit=source)
