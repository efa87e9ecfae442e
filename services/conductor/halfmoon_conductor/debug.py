"""What the conductor knows, for operators: `/debug/cluster` and `/debug/decisions`.

Read-only. Decisions are the last placements, deferrals and refusals with every candidate's
estimates, so that "why there?" and "why not?" have an answer; beside them how true predictions
came.
"""

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halfmoon_conductor.hub import Hub
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.accuracy import BOUNDS, ErrorHistogram
from halfmoon_scheduling.conductor import Conductor


def debug_app(core: Conductor, hub: Hub) -> Starlette:
    """The app to mount at ``/debug``."""

    async def cluster(request: Request) -> Response:
        refusals = hub.refusals()
        workers = [_worker(info, "") for info in core.cluster.workers()]
        workers += [_worker(info, refusals[info.worker_id]) for info in hub.refused()]
        return _json(
            {
                "model": core.cluster.model,
                "layout": core.cluster.layout,
                "requests": core.n_requests,
                "workers": workers,
            }
        )

    async def decisions(request: Request) -> Response:
        return _json(
            {
                "decisions": list(core.decisions),
                "errors": {
                    quantity: _errors(histogram)
                    for quantity, histogram in core.accuracy.histograms.items()
                },
                "refusals": core.refusals,
            }
        )

    return Starlette(routes=[Route("/cluster", cluster), Route("/decisions", decisions)])


def _worker(info: WorkerInfo, refused: str) -> dict[str, Any]:
    return {
        "worker_id": info.worker_id,
        "role": info.role,
        "generation": info.generation,
        "host": info.host,
        "n_blocks": info.n_blocks,
        "max_context": info.max_context,
        "draining": info.draining,
        "refused": refused,
    }


def _errors(histogram: ErrorHistogram) -> dict[str, Any]:
    """Observed over predicted; bounds are the buckets' upper ones, the last bucket is open."""
    return {
        "n": histogram.n,
        "mean_ratio": histogram.ratio_sum / max(1, histogram.n),
        "predicted_s": histogram.predicted_s,
        "observed_s": histogram.observed_s,
        "bounds": BOUNDS,
        "counts": histogram.counts,
    }


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data, enc_hook=str), media_type="application/json")
