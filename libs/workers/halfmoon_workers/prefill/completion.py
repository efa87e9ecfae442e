"""Wait for the end of a request's bytes: all acknowledged and verified."""

from halfmoon_prefix_cache.write_settling import SettlesWrites, settle_writes
from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure
from halfmoon_transfer.interface import TransferError
from halfmoon_workers.prefill.prefill_job import PrefillJob
from halfmoon_workers.prefill.prefill_refusal import PrefillRefused
from halfmoon_workers.prefill.prefix_cache_client import CorruptBlock, PrefixCacheClient


async def await_completion(
    job: PrefillJob, caching: PrefixCacheClient, transfer: SettlesWrites | None
) -> None:
    """Wait for the landing's acknowledgements and verify what was fetched.

    Args:
        job: whose KV is computed.
        caching: verifies what was fetched.
        transfer: wrote to the landing; None: the prompt was computed in it.

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
        late = isinstance(job.failure, TimeoutError)
        code = error_codes.EXPIRED if late else error_codes.PEER_FAILED
        failure = PrefillFailure(str(job.failure), retryable=True, code=code)
        raise PrefillRefused(failure)
    try:
        reports = [await write for write in job.landing_writes]
    except TransferError as error:
        reason = f"KV did not reach {decode}: {error}"
        failure = PrefillFailure(
            reason, retryable=True, culprit=decode, code=error_codes.PEER_FAILED
        )
        raise PrefillRefused(failure) from None
    if transfer is None or not any(report.retries for report in reports):
        return
    # What was written again may come once more, by the first way, when decode has gone on.
    if not await settle_writes(transfer, job.start.landing.region):
        reason = f"KV was written to {decode} again, and the first writes may still land"
        raise PrefillRefused(
            PrefillFailure(reason, retryable=True, culprit=decode, code=error_codes.PEER_FAILED)
        )


def fetch_failure(job: PrefillJob, error: Exception) -> PrefillFailure:
    """Return the failure of a request whose cached blocks did not come, or came damaged."""
    # The lease of this moment: another replica may have taken over.
    source = job.lease.address.worker_id if job.lease else None
    if job.order is not None and job.order.cached is not None:
        source = WorkerId(job.order.cached.region.segment)  # stage 0 has leased them there
    is_damaged = isinstance(error, CorruptBlock)
    return PrefillFailure(
        f"cached blocks are of no use: {error}",
        retryable=True,
        culprit=source,
        code=error_codes.BAD_BYTES if is_damaged else error_codes.PEER_FAILED,
    )
