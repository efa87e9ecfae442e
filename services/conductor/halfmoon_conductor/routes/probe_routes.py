"""Serve probes for load balancers, scripts and Prometheus, without an API key."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from pydantic import BaseModel

from halfmoon_conductor.api.openai.openai_objects import Health, Readiness
from halfmoon_conductor.engine_io.gateway_interface import Gateway
from halfmoon_conductor.http_server.auth_middleware import ConcurrencyLimit


class VersionInfo(BaseModel):
    """The version of this conductor, in vLLM's shape."""

    version: str


class ServerLoad(BaseModel):
    """The load of this conductor, in vLLM's shape."""

    #: Requests being answered, streams included.
    server_load: int


def probes_router(
    gateway: Gateway, concurrency: ConcurrencyLimit, metrics: Collector, version: str
) -> APIRouter:
    """Make the routes.

    Args:
        gateway: tells which roles have workers.
        concurrency: counts the requests being answered.
        metrics: the metrics that ``/metrics`` shows.
        version: Halfmoon's version.
    """
    router = APIRouter()

    @router.get("/health")
    async def health() -> Health:
        """Report that the process is alive."""
        return Health(status="ok")

    @router.get("/ping")
    async def ping() -> Health:
        """Report the same where SageMaker and others look for it."""
        return Health(status="ok")

    @router.get("/ready", response_model=Readiness, responses={503: {"model": Readiness}})
    async def ready() -> Response:
        """Report whether prefill and decode workers are ready for requests."""
        is_ready = gateway.ready()
        missing, reason = list(gateway.missing()), gateway.missing_hint()
        report = Readiness(ready=is_ready, missing=missing, reason=reason)
        body = report.model_dump(exclude=None if reason else {"reason"})
        return JSONResponse(body, status_code=200 if is_ready else 503)

    @router.get("/load")
    async def show_load() -> ServerLoad:
        """Report how many requests are being answered."""
        return ServerLoad(server_load=concurrency.n_running)

    @router.get("/version")
    async def show_version() -> VersionInfo:
        """Report Halfmoon's version."""
        return VersionInfo(version=version)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics(request: Request) -> Response:
        """Return Prometheus metrics."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"content-type": content_type})

    return router
