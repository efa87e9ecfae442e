"""Make the spans of a prefill when it is over, from the times that its job has kept.

prefill ──▶ queue      from the command's arrival to its first forward pass
       ├──▶ fetch      cached blocks: asked for, leased, read; beside queue and compute
       ├──▶ compute    its forward passes ──▶ chunk, chunk …
       └──▶ landing    KV written to decode, from the first layer to the last acknowledgement
"""

from collections.abc import Sequence
from itertools import islice

from halfmoon_protocol.messages import Message, PrefillFailed, PrefillStopped
from halfmoon_runtime.observability.tracing import Attributes, Span, Tracer
from halfmoon_transfer.interface import Report, Transfer
from halfmoon_workers.prefill.prefill_job import PrefillJob

#: Chunks that get a span each; a prompt of a million tokens has thousands.
_MAX_CHUNKS = 64


def record_prefill_spans(
    job: PrefillJob, ending: Message | None, tracer: Tracer | None, now_s: float
) -> None:
    """Make them, if the request is sampled.

    Args:
        job: over.
        ending: what its conductor was told instead of `PrefillDone`; None: nothing else.
        tracer: None: no traces here.
        now_s: by the clock that the job's times are of.
    """
    if tracer is None or job.start.trace is None:
        return
    said: Attributes = {"halfmoon.request_id": job.request_id, "halfmoon.tokens": job.n_tokens}
    span = tracer.join(job.start.trace, "prefill", job.arrived_s, said)
    if span is None:
        return
    span.stage("queue", job.arrived_s, job.computing_since_s or now_s)
    _fetch(job, span, now_s)
    _compute(job, span)
    _landing(job, span, now_s)
    match ending:
        case PrefillFailed(reason=reason):
            span.end(now_s, reason)
        case PrefillStopped():
            span.event("cancelled", now_s)
            span.end(now_s)
        case _:
            span.set({"halfmoon.cached_tokens": job.n_cached})
            span.end(job.done_s or now_s)


def _fetch(job: PrefillJob, span: Span, now_s: float) -> None:
    if not job.fetching_since_s:
        return
    reports, error = _reports(job.loads)
    stage = span.child("fetch", job.fetching_since_s, _moved(reports))
    if job.leased_s:
        stage.event("leased", job.leased_s)
    blocks = job.n_cached // job.start.landing.layout.block_size
    stage.set(
        {
            "halfmoon.blocks": blocks,
            "halfmoon.blocks_from_disk": job.n_from_disk,
            "halfmoon.source": job.fetched_from or "",
        }
    )
    # Perhaps no kvstore had the blocks that the conductor knew of: then nothing was read.
    stage.end(job.leased_s + job.fetch_s if job.leased_s else now_s, error)


def _compute(job: PrefillJob, span: Span) -> None:
    if not job.passes:
        return
    first, last = job.passes[0], job.passes[-1]
    said = {
        "halfmoon.chunks": len(job.passes),
        "halfmoon.tokens": last.stop - first.start,
        "halfmoon.forward_s": sum(each.ended_s - each.began_s for each in job.passes),
        "halfmoon.layers_wait_s": sum(each.layers_wait_s for each in job.passes),
    }
    stage = span.child("compute", first.began_s, said)
    for each in islice(job.passes, _MAX_CHUNKS):
        chunk = {
            "halfmoon.first_token": each.start,
            "halfmoon.tokens": each.stop - each.start,
            "halfmoon.requests": each.n_requests,
        }
        stage.stage("chunk", each.began_s, each.ended_s, chunk)
    stage.end(last.ended_s)


def _landing(job: PrefillJob, span: Span, now_s: float) -> None:
    if not job.landing_writes:
        return
    reports, error = _reports(job.landing_writes)
    said = {**_moved(reports), "halfmoon.decode": job.start.landing.region.segment}
    span.child("landing", job.landing_since_s, said).end(job.settled_s or now_s, error)


def _reports(transfers: Sequence[Transfer]) -> tuple[list[Report], str]:
    """Of transfers that are over; and what the first one that failed says."""
    reports, error = [], ""
    for each in transfers:
        try:
            reports.append(each.result())
        except Exception as failure:
            error = error or str(failure) or type(failure).__name__
    return reports, error


def _moved(reports: Sequence[Report]) -> Attributes:
    return {
        "halfmoon.bytes": sum(report.n_bytes for report in reports),
        "halfmoon.path": sorted({way for report in reports for way in report.path}),
        "halfmoon.retries": sum(report.retries for report in reports),
    }
