"""Serve the conductor's state to operators: the routes below `/debug`.

All routes are read-only but one: `role_routes` changes roles. Decisions are the last placements,
deferrals and refusals, with the best candidates' estimates and a reason for each. Each decision has
its outcome beside it, and the errors of the predictions are shown in total.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.error_responses import error_response, on_http_error
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.page.cluster_view import ConductorInfo, cluster_view
from halfmoon_conductor.page.prometheus_targets import PrometheusTargets
from halfmoon_conductor.page.role_routes import role_routes
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.conductor.decision_log import Decision
from halfmoon_scheduling.conductor.prediction_error import BUCKET_BOUNDS, ErrorHistogram
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.placement.placement_explanations import (
    explain_placement,
    explain_rejected_candidate,
)

#: Numbers in a query, as JSON writes them, and whole ones.
_ANY = re.compile(r"[0-9]{1,400}(\.[0-9]{1,400})?([eE][+-]?[0-9]{1,4})?")
_WHOLE = re.compile(r"[0-9]{1,15}")
#: Most characters of a request id, or a part of one, that decisions are searched for.
_MAX_SEARCHED = 128


def debug_app(
    observer: CoreObserver,
    links: WorkerLinks,
    clock: Clock,
    conductor: ConductorInfo,
    trace_id: Callable[[RequestId], str | None] = lambda request_id: None,
    metrics_urls: Sequence[str] = (),
) -> Starlette:
    """Build the app to mount at ``/debug``.

    Args:
        observer: the histories.
        links: the links to the workers.
        clock: the shell's clock.
        conductor: describes this conductor.
        trace_id: returns the trace id of a sampled request, else nothing.
        metrics_urls: where this conductor serves metrics, of requests and of its process.
    """
    core = observer.core
    targets = PrometheusTargets(conductor.conductor_id, metrics_urls)

    async def cluster(request: Request) -> Response:
        return _json(cluster_view(observer, links, conductor, clock.now()))

    async def decisions(request: Request) -> Response:
        try:
            last = int(_number(request, "last", len(core.decisions), _WHOLE))
            searched = _searched_id(request)
        except InvalidRequest as error:
            return error_response(error, request.url.path)
        found = (each for each in reversed(core.decisions) if searched in each.request_id)
        newest_first = islice(found, last)
        return _json(
            {
                "now_s": clock.now(),
                "decisions": [
                    _decision(observer, each) | {"trace_id": trace_id(each.request_id)}
                    for each in newest_first
                ][::-1],
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
        latency_history = observer.latencies
        return _json(
            {
                "now_s": latency_history.now(),
                "ttft_slo_s": core.config.ttft_slo_s,
                "tbt_slo_s": core.config.tbt_slo_s,
                "seconds": latency_history.since(after_s),
            }
        )

    async def activity(request: Request) -> Response:
        try:
            after_s = _number(request, "after_s", 0.0)
        except InvalidRequest as error:
            return error_response(error, request.url.path)
        now = clock.now()
        return _json(
            {
                "now_s": now,
                "seconds": observer.requests.activity.since(after_s, now),
                "events": list(observer.workers.events),
            }
        )

    async def scraped(request: Request) -> Response:
        return _json(targets.groups(links.records(), core.cluster.model))

    return Starlette(
        routes=[
            Route("/cluster", cluster),
            Route("/decisions", decisions),
            Route("/latencies", latencies),
            Route("/activity", activity),
            Route("/prometheus-targets", scraped),
            *role_routes(links.shell, clock),
        ],
        exception_handlers={HTTPException: on_http_error},
    )


def _decision(observer: CoreObserver, decision: Decision) -> dict[str, Any]:
    """Return one decision with its explanations, and what happened to the request since."""
    placement, mode = decision.placement, PLACEMENT_MODES[observer.core.config.placement]
    shown: dict[str, Any] = msgspec.to_builtins(decision)
    is_placed = decision.outcome == "placed"
    shown["why"] = explain_placement(placement, mode) if is_placed else decision.reason
    for row, estimate in zip(shown["placement"]["estimates"], placement.estimates, strict=True):
        row["why_not"] = explain_rejected_candidate(estimate, placement, mode)
    shown["course"] = observer.requests.get(decision.request_id)
    return shown


def _errors(histogram: ErrorHistogram) -> dict[str, Any]:
    """Return a histogram of observed over predicted values.

    Bounds are upper ones; the last bucket is open.
    """
    return {
        "n": histogram.n,
        "mean_ratio": histogram.ratio_sum / max(1, histogram.n),
        "predicted_s": histogram.predicted_s,
        "observed_s": histogram.observed_s,
        "bounds": BUCKET_BOUNDS,
        "counts": histogram.counts,
    }


def _number(request: Request, name: str, default: float, form: re.Pattern[str] = _ANY) -> float:
    """Return a number of at least 0 from the query.

    Raises:
        InvalidRequest: the text is not such a number.
    """
    text = request.query_params.get(name, str(default))
    number = float(text) if form.fullmatch(text) else math.inf
    if math.isinf(number):
        kind = "whole number" if form is _WHOLE else "number"
        raise InvalidRequest(f"{name} is {text[:40]!r}, it is a {kind} from 0 on.", param=name)
    return number


def _searched_id(request: Request) -> str:
    """Return the part of a request id that decisions are searched for; empty: all are wanted.

    Raises:
        InvalidRequest: the text is longer than an id can be.
    """
    text = request.query_params.get("request_id", "")
    if len(text) > _MAX_SEARCHED:
        message = f"request_id has {len(text)} characters, it may have at most {_MAX_SEARCHED}."
        raise InvalidRequest(message, param="request_id")
    return text


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data, enc_hook=str), media_type="application/json")
