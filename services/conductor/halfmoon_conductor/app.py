"""Build a conductor: metadata, core, worker links, REST. Open in order and close in reverse."""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
import uvicorn
from starlette.types import ASGIApp

from halfmoon_conductor.build_conductor import BuiltConductor, build_conductor
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.http_server.auth_middleware import is_guarded
from halfmoon_conductor.http_server.body_receiver import BodyLimits
from halfmoon_conductor.http_server.bounded_http import HttpLimits, bounded_http
from halfmoon_conductor.inputs.body_preparation import PreparationSpec
from halfmoon_conductor.inputs.body_preparers import MEMORY_BYTES, ProcessPreparer
from halfmoon_conductor.inputs.checkpoint_trial import try_checkpoint
from halfmoon_conductor.inputs.sampling_defaults import read_sampling_defaults
from halfmoon_conductor.journal_file import JournalFile
from halfmoon_conductor.page.cluster_view import ConductorInfo
from halfmoon_conductor.page.debug_routes import debug_app
from halfmoon_conductor.resumption.resumable_streams import ResumableStreams
from halfmoon_conductor.resumption.resumption_limits import ResumptionLimits
from halfmoon_conductor.routes.rest_app import RestLimits, create_app
from halfmoon_conductor.settings import EMBEDDED, ConductorSettings
from halfmoon_conductor.stored_responses.response_store import ResponseStore
from halfmoon_conductor.tenants import Tenants, TenantsFileError
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_conductor.text.tokenizer_loader import FAKE, find_tokenizer, open_tokenizer
from halfmoon_conductor.workers.worker_links import MAX_LINKS
from halfmoon_metadata import MemoryStore, MetadataStore, open_store
from halfmoon_metadata.cluster_namespace import in_cluster
from halfmoon_metadata.http_server import metadata_app
from halfmoon_metadata.metadata_token import metadata_tokens
from halfmoon_metadata.port_holder import port_refusal
from halfmoon_metadata.stalling_clock import StallingClock
from halfmoon_metadata.store_registry import open_values
from halfmoon_models.tokenizer.embedded_tokens import unembedded_warning
from halfmoon_protocol.ids import ConductorId
from halfmoon_runtime.channels.zmq_link import LINK_DESCRIPTORS
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.cluster_claim import ClusterClaim
from halfmoon_runtime.host_check import hosts_to_check
from halfmoon_runtime.lifecycle import CannotStart, Service, cannot_start_on
from halfmoon_runtime.observability.operator_tokens import operator_tokens
from halfmoon_runtime.observability.tracer_setup import open_tracer
from halfmoon_sandbox import Sandbox

_log = structlog.get_logger(__name__)
#: Connections of the embedded metadata server: each worker keeps a few.
_MAX_METADATA_CONNECTIONS = 1024
#: Seconds between two renewals of the Date header.
_DATE_S = 1.0


class _Server(uvicorn.Server):
    """Run uvicorn and leave signals to the service's lifecycle."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        """Make a server that runs until `stopping` is set."""
        super().__init__(config)
        self._stopping = stopping

    async def main_loop(self) -> None:
        """Renew the Date header once a second; uvicorn's own loop wakes up ten times as often."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


async def run(settings: ConductorSettings, service: Service) -> None:
    """Run a conductor until told to stop, then finish the requests in progress."""
    async with AsyncExitStack() as stack:
        descriptors = _share_descriptors()
        # Listen first: loading takes seconds, in which another process might take the port.
        listener = _listen("http_port", settings.host, settings.http_port)
        stack.callback(listener.close)
        embedded = settings.metadata == EMBEDDED
        if embedded:
            metadata_listener = _listen(
                "metadata_port", settings.metadata_bind, settings.metadata_port
            )
            stack.callback(metadata_listener.close)
        service.report_stage("loading", worker_id=settings.worker_id, model=settings.model)
        if tracer := open_tracer(settings, "halfmoon-conductor"):
            stack.push_async_callback(tracer.close)
        with cannot_start_on(TenantsFileError):
            tenants = Tenants.read(Path(settings.tenants)) if settings.tenants else None
        try:
            found = await asyncio.to_thread(find_tokenizer, settings.model)
            preparer = _make_preparer(settings, found)
            stack.callback(preparer.close)
            preparer.start()
            if not found.startswith(FAKE):
                await try_checkpoint(preparer, settings.model)
            tokenizer = await asyncio.to_thread(open_tokenizer, settings.model)
            sampling_defaults = await asyncio.to_thread(
                read_sampling_defaults, tokenizer.source, settings.generation_config
            )
        except TokenizerUnavailable as error:
            raise CannotStart(str(error)) from error
        if tokenizer.unembedded_tokens:
            _log.warning(
                "tokens without an embedding",
                reason=unembedded_warning(
                    Path(tokenizer.source), tokenizer.unembedded_tokens, tokenizer.vocab_size
                ),
            )
        grammars = GrammarChecker.of(tokenizer)
        stack.callback(grammars.close)
        if tokenizer.knows_grammars:
            grammars.start()
        cluster_key = settings.cluster_key.get_secret_value()
        lease_clock = StallingClock()
        with cannot_start_on(ValueError):
            records: MetadataStore = (
                MemoryStore(lease_clock)
                if embedded
                else open_store(settings.metadata, cluster_key=cluster_key, tls_ca=settings.tls_ca)
            )
            store = in_cluster(records, settings.cluster)
        stack.callback(store.close)
        claim = ClusterClaim(store, cluster_key, settings.metadata)
        network = ZmqNetwork(cluster_key=cluster_key)
        stack.push_async_callback(network.close)

        if journal := _open_journal(settings):
            stack.callback(journal.close)
        built = build_conductor(
            ConductorId(settings.worker_id),
            store,
            network,
            settings.scheduling,
            late_s=lambda: service.lag.late_s,
            recorders=[] if journal is None else [journal.record],
            tracer=tracer,
            served_model_name=settings.served_model_name,
            decode_stall_s=settings.decode_stall_s,
            max_links=descriptors.links,
        )
        traced = built.traced
        stack.push_async_callback(built.presence.leave)
        await stack.enter_async_context(service.running(_follow(claim, built)))

        info = ConductorInfo(
            settings.worker_id, settings.metadata.partition(":")[0], settings.trace_url
        )
        metrics_urls = _metrics_urls(settings, service, listener)
        debug = debug_app(
            built.observer, built.links, built.clock, info, traced.trace_id, metrics_urls
        )
        mounts: list[tuple[str, ASGIApp]] = [("/debug", debug)]
        streams = ResumableStreams(_resumption_limits(settings))
        stack.push_async_callback(streams.close)
        responses = _open_responses(settings)
        if responses is not None:
            stack.callback(responses.close)
        app = create_app(
            traced.gateway(built.gateway),
            tokenizer,
            registry=built.registry,
            latencies=built.observer.latencies,
            limits=_rest_limits(settings),
            tenants=tenants,
            extra_mounts=mounts,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            model_aliases=settings.other_model_names,
            sampling_defaults=sampling_defaults,
            preparer=preparer,
            grammars=grammars,
            streams=streams,
            responses=responses,
            operator_tokens=operator_tokens(cluster_key),
            behind_s=lambda: service.lag.behind_s,
        )
        limits = HttpLimits(
            max_connections=descriptors.connections, keep_alive_s=settings.keep_alive_s
        )
        hosts = hosts_to_check(settings, service.tls, has_keys=tenants is not None)
        server = _make_server(
            traced.app(app, is_guarded),
            bounded_http(limits, service.tls, hosts),
            service.stopping,
            settings.drain_s,
        )
        where = {"url": _url(listener, service.tls)}
        # It closes last: workers renew their leases there while requests end.
        metadata_closing = asyncio.Event()
        if embedded:
            service.spawn(lease_clock.tick_forever(), name="leases")
            metadata = metadata_app(records, tokens=metadata_tokens(cluster_key))
            limits = msgspec.structs.replace(limits, max_connections=_MAX_METADATA_CONNECTIONS)
            hosts = hosts_to_check(settings, service.tls, has_keys=bool(cluster_key))
            http = bounded_http(limits, service.tls, hosts)
            metadata_server = _make_server(metadata, http, metadata_closing, 1.0)
            _serve(service, metadata_server, metadata_listener, "metadata server")
            where["metadata"] = f"{_url(metadata_listener, service.tls)}/metadata"
        serving = _serve(service, server, listener, "REST API")
        service.ready()
        service.report_stage("ready", worker_id=settings.worker_id, **where)
        await service.stopping.wait()
        service.report_stage("draining", worker_id=settings.worker_id)
        try:
            await serving
        finally:
            metadata_closing.set()


async def _follow(claim: ClusterClaim, built: BuiltConductor) -> None:
    """Claim the cluster's records, then follow its workers until cancelled.

    Raises:
        CoreBroken: nothing is decided right any more; streams go on elsewhere.
    """
    await claim.take()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(claim.keep())
        tasks.create_task(built.run())


def _open_responses(settings: ConductorSettings) -> ResponseStore | None:
    if not settings.response_ttl_s:
        return None
    values = open_values(
        settings.metadata,
        ttl_s=settings.response_ttl_s,
        max_bytes=settings.response_mib * 2**20,
        tls_ca=settings.tls_ca,
        cluster=settings.cluster,
    )
    return ResponseStore(values, settings.response_ttl_s)


def _make_server(
    app: ASGIApp, http: type[asyncio.Protocol], stopping: asyncio.Event, drain_s: float
) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",  # the service announces start and stop itself
            access_log=False,
            timeout_graceful_shutdown=int(drain_s),
        ),
        stopping,
    )


def _serve(
    service: Service, server: _Server, listener: socket.socket, name: str
) -> "asyncio.Task[None]":
    """Serve at a socket: from the return on, no connection to it is refused.

    The server's task begins to listen later, on a busy machine tens of milliseconds after `ready`.
    What connects before waits in the kernel's queue.
    """
    listener.listen(server.config.backlog)
    return service.spawn(server.serve(sockets=[listener]), name=name)


def _metrics_urls(
    settings: ConductorSettings, service: Service, listener: socket.socket
) -> tuple[str, ...]:
    """Return where a Prometheus on another host scrapes this conductor."""
    try:
        host = settings.advertised_host
    except OSError:  # peers never dial a conductor, so no other part needs this address
        host = socket.gethostname()
    rest = _url(listener, service.tls, host)
    return (rest,) if service.http is None else (rest, service.http.url(host))


def _url(listener: socket.socket, tls: ssl.SSLContext | None, advertised: str = "") -> str:
    own_host, port = listener.getsockname()[:2]
    host = advertised or own_host
    scheme = "http" if tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _make_preparer(settings: ConductorSettings, tokenizer: str) -> ProcessPreparer:
    spec = PreparationSpec(tokenizer, settings.tool_call_parser, settings.other_model_names)
    sandbox = Sandbox(
        "halfmoon_conductor.inputs.body_preparation:make_handler",
        msgspec.msgpack.encode(spec),
        memory_bytes=MEMORY_BYTES,
        niceness=1,  # first tokens wait for it
    )
    return ProcessPreparer(sandbox, max(2, os.cpu_count() or 2))


def _open_journal(settings: ConductorSettings) -> JournalFile | None:
    if not settings.journal_path:
        return None
    with cannot_start_on(OSError, f"journal_path {settings.journal_path!r} can't be written"):
        return JournalFile(
            Path(settings.journal_path),
            settings.scheduling,
            max_bytes=settings.journal_max_mib * 1024 * 1024,
        )


def _rest_limits(settings: ConductorSettings) -> RestLimits:
    return RestLimits(
        bodies=BodyLimits(
            max_bytes=settings.max_body_bytes,
            max_total_bytes=settings.max_bodies_mib * 1024 * 1024,
            timeout_s=settings.body_timeout_s,
        ),
        max_concurrent=settings.max_concurrent,
        cors_origins=tuple(filter(None, settings.cors_origins.split(","))),
    )


def _resumption_limits(settings: ConductorSettings) -> ResumptionLimits:
    return ResumptionLimits(
        window_s=settings.resume_window_s,
        max_streams=settings.resume_streams,
        max_bytes=settings.resume_mib * 1024 * 1024,
    )


class _Descriptors(NamedTuple):
    """Most connections of clients and links to workers for which there are descriptors."""

    connections: int
    links: int


def _share_descriptors() -> _Descriptors:
    """Take as many descriptors as the system allows, and share them out.

    Few clusters need both shares, which are more than all together. Where both are used up, what
    comes next is refused, and what is there stays.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return _Descriptors(
        connections=min(HttpLimits().max_connections, limit * 3 // 4),
        links=min(MAX_LINKS, limit * 4 // 5 // LINK_DESCRIPTORS),
    )


def _listen(setting: str, host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        CannotStart: the address is not available; the text names it and the port's setting.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay (40 ms per answer) off only if the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CannotStart(port_refusal(setting, port, host, error), may_pass=True) from error
    return listener
