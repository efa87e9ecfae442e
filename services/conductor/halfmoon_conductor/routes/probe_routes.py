"""Routes for what watches a conductor: load balancers, scripts and Prometheus. No key is needed."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from pydantic import BaseModel

from halfmoon_conductor.api.openai.openai_objects import Health, Readiness
from halfmoon_conductor.engine_io.gateway_interface import Gateway
from halfmoon_conductor.http_server.auth_middleware import ConcurrencyLimit


class VersionInfo(BaseModel):
    """Of this conductor; vLLM's shape."""

    version: str


class ServerLoad(BaseModel):
    """How busy this conductor is; vLLM's shape."""

    #: Requests being answered, streams included.
    server_load: int


def probes_router(
    gateway: Gateway, load: ConcurrencyLimit, metrics: Collector, version: str
) -> APIRouter:
    """The routes.

    Args:
        gateway: whose workers' presence is told.
        load: what the door counts.
        metrics: what ``/metrics`` shows.
        version: Halfmoon's.
    """
    router = APIRouter()

    @router.get("/health")
    async def health() -> Health:
        """The process lives and answers."""
        return Health(status="ok")

    @router.get("/ping")
    async def ping() -> Health:
        """The same, where SageMaker and others look for it."""
        return Health(status="ok")

    @router.get("/ready", response_model=Readiness, responses={503: {"model": Readiness}})
    async def ready() -> Response:
        """Whether prefill and decode workers are there to serve requests."""
        is_ready = gateway.ready()
        report = Readiness(ready=is_ready, missing=list(gateway.missing()))
        return JSONResponse(report.model_dump(), status_code=200 if is_ready else 503)

    @router.get("/load")
    async def show_load() -> ServerLoad:
        """How many requests are being answered."""
        return ServerLoad(server_load=load.n_running)

    @router.get("/version")
    async def show_version() -> VersionInfo:
        """Which Halfmoon this is."""
        return VersionInfo(version=version)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics(request: Request) -> Response:
        """Prometheus metrics."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"content-type": content_type})

    return router
