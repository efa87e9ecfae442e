"""What the conductor knows, for operators: the routes below `/debug`.

Read-only. Decisions are the last placements, deferrals and refusals with every candidate's
estimates, so that "why there?" and "why not?" have an answer, each with what came of it; beside
them how true predictions came.
"""

from itertools import islice
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.error_responses import error_response
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.page.cluster_view import ConductorInfo, cluster_view
from halfmoon_conductor.page.decision_explanations import (
    explain_placement,
    explain_rejected_candidate,
)
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.conductor.decision_log import Decision
from halfmoon_scheduling.conductor.prediction_error import BUCKET_BOUNDS, ErrorHistogram

#: Of a number in a query.
_MAX_DIGITS = 18


def debug_app(
    observer: CoreObserver, hub: WorkerLinks, clock: Clock, about: ConductorInfo
) -> Starlette:
    """The app to mount at ``/debug``; `clock` is that of the shell."""
    core = observer.core

    async def cluster(request: Request) -> Response:
        return _json(cluster_view(observer, hub, about, clock.now()))

    async def decisions(request: Request) -> Response:
        try:
            last = int(_number(request, "last", len(core.decisions)))
        except InvalidRequest as error:
            return error_response(error, request.url.path)
        newest_first = islice(reversed(core.decisions), last)
        return _json(
            {
                "now_s": clock.now(),
                "decisions": [_decision(observer, each) for each in newest_first][::-1],
                "errors": {
                    quantity: _errors(histogram)
                    for quantity, histogram in core.prediction_errors.histograms.items()
                },
                "refusals": core.refusals,
            }
        )

    async def latencies(request: Request) -> Response:
        try:
            after_s = _number(request, "after_s", 0.0)
        except InvalidRequest as error:
            return error_response(error, request.url.path)
        seen = observer.latencies
        return _json(
            {
                "now_s": seen.now(),
                "ttft_slo_s": core.config.ttft_slo_s,
                "tbt_slo_s": core.config.tbt_slo_s,
                "seconds": seen.since(after_s),
            }
        )

    return Starlette(
        routes=[
            Route("/cluster", cluster),
            Route("/decisions", decisions),
            Route("/latencies", latencies),
        ]
    )


def _decision(observer: CoreObserver, decision: Decision) -> dict[str, Any]:
    """One decision, in words too, and what came of it."""
    mode, chosen = observer.core.config.placement, decision.placement.chosen
    told: dict[str, Any] = msgspec.to_builtins(decision)
    told["why"] = explain_placement(decision, mode)
    rows = zip(told["placement"]["estimates"], decision.placement.estimates, strict=True)
    for row, estimate in rows:
        row["why_not"] = explain_rejected_candidate(estimate, chosen, mode)
    told["course"] = observer.requests.get(decision.request_id)
    return told


def _errors(histogram: ErrorHistogram) -> dict[str, Any]:
    """Observed over predicted; bounds are the buckets' upper ones, the last bucket is open."""
    return {
        "n": histogram.n,
        "mean_ratio": histogram.ratio_sum / max(1, histogram.n),
        "predicted_s": histogram.predicted_s,
        "observed_s": histogram.observed_s,
        "bounds": BUCKET_BOUNDS,
        "counts": histogram.counts,
    }


def _number(request: Request, name: str, default: float) -> float:
    """A number of at least 0 out of the query.

    Raises:
        InvalidRequest: it is none.
    """
    text = request.query_params.get(name, str(default))
    if len(text) > _MAX_DIGITS or not text.replace(".", "", 1).isdecimal():
        raise InvalidRequest(f"{name} is {text[:40]!r}, it is a number from 0 on.", param=name)
    return float(text)


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data, enc_hook=str), media_type="application/json")
