"""Show the cluster to operators: `/debug/cluster`.

Times on the conductor's clock are given as seconds ago. Predicted and reported values stand beside
each other under different names.
"""

from typing import Any, NamedTuple

import msgspec

from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.observability.history.worker_history import AnyWorkerLoad
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeLoad, KvstoreLoad, PrefillLoad, WorkerInfo
from halfmoon_scheduling.conductor.conductor_machine import Conductor

#: Most hot prefixes that are shown.
MAX_HOT = 16


class ConductorInfo(NamedTuple):
    """The conductor that serves the view."""

    conductor_id: str
    #: Kind of its metadata server: embedded, redis, etcd or http.
    metadata: str = "embedded"
    #: URL of a trace, with ``{trace_id}`` in it; empty: traces are not linked.
    trace_url: str = ""


class _Queues(NamedTuple):
    """The core's current predictions, by worker."""

    prefills_s: dict[WorkerId, float]
    decodes_s: dict[WorkerId, float]


def cluster_view(
    observer: CoreObserver, links: WorkerLinks, conductor: ConductorInfo, now: float
) -> dict[str, Any]:
    """Return the cluster's state, ready to be written as JSON."""
    core = observer.core
    refusals, unused = links.refusals(), core.cluster.unused_kvstores
    queues = _Queues(core.cluster.prefills.queues_s(now), core.cluster.decodes.loads_s())
    workers = [
        _record(info, unused.get(info.worker_id, "")) | _current(observer, info, queues, now)
        for info in core.cluster.workers()
    ]
    workers += [_record(info, refusals[info.worker_id]) for info in links.refused_workers()]
    unreachable = links.unreachable.found()
    silent = {each.info.worker_id for each in unreachable}
    layout, pools = core.cluster.layout, core.loads(now)
    return {
        "conductor": conductor._asdict(),
        "now_s": now,
        "model": core.cluster.model,
        "layout": layout,
        "block_bytes": 0 if layout is None else layout.block_bytes,
        "scheduling": msgspec.to_builtins(core.config),
        "requests": core.n_requests,
        "revision": observer.requests.revision,
        "pools": pools._asdict(),
        "reuse": observer.requests.reuse,
        "workers": workers,
        "unreachable": [
            _record(each.info)
            | {
                "address": each.info.commands,
                "for_s": each.for_s,
                "reason": each.reason,
                "advice": each.advice,
            }
            for each in unreachable
        ],
        # One that was lost and is still registered is unreachable, and not gone.
        "gone": [
            _record(worker.info) | {"reason": worker.reason, "s_ago": now - worker.at_s}
            for worker in observer.workers.departed(now)
            if worker.info.worker_id not in silent
        ],
        "hot_prefixes": _hot_prefixes(observer, now),
        "copies": [
            {
                "prefix": copy.hashes[-1].hex(),
                "n_blocks": len(copy.hashes),
                "source": copy.source,
                "target": copy.target,
            }
            for copy in core.copies_under_way()
        ],
    }


def _record(info: WorkerInfo, refused: str = "") -> dict[str, Any]:
    return {
        "worker_id": info.worker_id,
        "role": info.role,
        "roles": info.roles,
        "generation": info.generation,
        "host": info.host,
        "n_blocks": info.n_blocks,
        "max_context": info.max_context,
        "computes_with": info.computes_with,
        "key_id": info.key_id,
        "stage": info.stage,
        "draining": info.draining,
        "refused": refused,
    }


def _current(
    observer: CoreObserver, info: WorkerInfo, queues: _Queues, now: float
) -> dict[str, Any]:
    report = observer.workers.last_report(info.worker_id)
    return {
        # A kvstore reports nothing until it knows the block layout.
        "heard_s_ago": None if report is None or report.load is None else now - report.at_s,
        "home": observer.core.cluster.home_of(info.worker_id) if info.role == "prefill" else None,
        "load": _load(observer.core, info, None if report is None else report.load, queues),
    }


def _load(
    core: Conductor, info: WorkerInfo, reported: AnyWorkerLoad | None, queues: _Queues
) -> dict[str, Any]:
    """Return a worker's last report, this conductor's requests there, and predictions for it.

    A worker without a report is shown idle, with all of its blocks free.
    """
    worker_id, n_blocks = info.worker_id, info.n_blocks
    match info.role:
        case "prefill":
            if not isinstance(reported, PrefillLoad):
                reported = PrefillLoad(
                    n_queued=0, queued_tokens=0, free_pages=n_blocks, n_pages=n_blocks
                )
            return {
                "n_requests": len(core.cluster.prefills.requests(worker_id)),
                "queue_s": queues.prefills_s[worker_id],
                **msgspec.structs.asdict(reported),
            }
        case "decode":
            if not isinstance(reported, DecodeLoad):
                reported = DecodeLoad(
                    n_running=0,
                    n_reserved=0,
                    context_tokens=0,
                    free_pages=n_blocks,
                    n_pages=n_blocks,
                    step_s=0.0,
                )
            return {
                "n_requests": len(core.cluster.decodes.requests(worker_id)),
                "tbt_s": queues.decodes_s[worker_id],
                **msgspec.structs.asdict(reported),
            }
        case "kvstore":
            if not isinstance(reported, KvstoreLoad):
                reported = KvstoreLoad(n_stored=0, n_reserved=0, n_leased=0, n_blocks=n_blocks)
            return {
                "n_readers": core.cluster.transfers.get(worker_id, 0),
                "n_indexed": core.index.n_blocks(worker_id),
                "memory": {
                    "n_stored": reported.n_stored,
                    "n_reserved": reported.n_reserved,
                    "n_leased": reported.n_leased,
                    "n_blocks": reported.n_blocks,
                },
                "disk": {
                    "n_stored": reported.n_disk_stored,
                    "n_blocks": reported.n_disk_blocks,
                },
                "lookups": {
                    "memory": reported.n_found_in_memory,
                    "disk": reported.n_found_on_disk,
                    "missing": reported.n_missing,
                },
            }


def _hot_prefixes(observer: CoreObserver, now: float) -> list[dict[str, Any]]:
    index, layout = observer.core.index, observer.core.cluster.layout
    block_size = 0 if layout is None else layout.block_size
    return [
        {
            "prefix": hot.block.hex(),
            "n_blocks": hot.n_blocks,
            "n_tokens": hot.n_blocks * block_size,
            "uses": hot.uses,
            "last_request_id": hot.last,
            "holders": sorted(index.holders(hot.block)),
        }
        for hot in observer.prefixes.hottest(MAX_HOT, now)
    ]
