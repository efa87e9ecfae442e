"""What the conductor knows, for operators: `/debug/cluster` and `/debug/decisions`.

Read-only. Decisions are the last placements with every candidate's estimates, so that
"why there?" has an answer.
"""

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halfmoon_conductor.hub import Hub
from halfmoon_protocol.messages import WorkerInfo
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
        return _json({"decisions": list(core.decisions)})

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


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data, enc_hook=str), media_type="application/json")
