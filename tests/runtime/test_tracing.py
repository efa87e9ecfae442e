"""Spans: whose children they are, when they are made, and that nothing needs their packages."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.observability.otel import OtelTracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


class Kept:
    """A tracer, and the spans that it has made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer: Any = OtelTracer(
            "halfmoon-test", "worker-7", SimpleSpanProcessor(self.exporter)
        )

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def served(self, **headers: str | list[str]) -> Any:
        """The span of a request with these headers."""
        given = {k: v if isinstance(v, list) else [v] for k, v in headers.items()}
        span = self.tracer.serve("asked", lambda name: given.get(name, []), time.monotonic())
        if span is None:
            return None
        span.end(time.monotonic())
        return self.spans()["asked"]


@pytest.fixture
def kept() -> Kept:
    return Kept()


def ids(span: Any) -> tuple[str, str]:
    """Trace and parent."""
    parent = span.parent
    return f"{span.context.trace_id:032x}", f"{parent.span_id:016x}" if parent else ""


@pytest.mark.parametrize("tracestate", ["rojo=1,congo=2", ["rojo=1", "congo=2"]])
def test_valid_contexts_go_on(kept: Kept, tracestate: str | list[str]) -> None:
    span = kept.served(traceparent=SAMPLED, tracestate=tracestate)
    assert ids(span) == (TRACE, PARENT)
    assert span.context.trace_state.to_header() == "rojo=1,congo=2"


@pytest.mark.parametrize("traceparent", ["", f"00-{TRACE}-{PARENT}-1", [SAMPLED, SAMPLED]])
def test_broken_contexts_begin_a_new_trace(kept: Kept, traceparent: str | list[str]) -> None:
    span = kept.served(traceparent=traceparent, tracestate="rojo=1")
    trace_id, parent = ids(span)
    assert (trace_id == TRACE, parent) == (False, "")
    assert not span.context.trace_state


def test_what_a_client_does_not_want_sampled_is_not(kept: Kept) -> None:
    assert kept.served(traceparent=f"00-{TRACE}-{PARENT}-00") is None
    assert not kept.spans()


def test_the_environments_sampler_decides_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    kept = Kept()
    assert kept.served() is None
    assert kept.served(traceparent=SAMPLED) is None
    assert kept.tracer.join(TraceContext(SAMPLED), "worked", 1.0) is not None


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{TRACE}-{PARENT}-00"])
def test_a_worker_begins_no_trace_of_its_own(kept: Kept, traceparent: str) -> None:
    assert kept.tracer.join(TraceContext(traceparent), "worked", 1.0) is None
    assert kept.tracer.join(None, "worked", 1.0) is None


def test_a_context_makes_spans_of_another_service_its_children(kept: Kept) -> None:
    asked = kept.tracer.serve("asked", {"traceparent": [SAMPLED], "tracestate": ["a=1"]}.get, 1.0)
    there = Kept()
    worked = there.tracer.join(asked.context, "worked", 2.0)
    worked.child("part", 2.5).end(3.0)
    worked.end(4.0)
    asked.end(5.0)
    context = kept.spans()["asked"].context
    assert ids(there.spans()["worked"]) == (TRACE, f"{context.span_id:016x}")
    assert ids(there.spans()["part"])[0] == TRACE
    assert asked.context.tracestate == "a=1"


def test_times_of_the_monotonic_clock_become_times_of_day(kept: Kept) -> None:
    now_ns, now_s = time.time_ns(), time.monotonic()
    span = kept.tracer.join(TraceContext(SAMPLED), "worked", now_s - 60.0)
    span.stage("part", now_s - 60.0, now_s - 59.0)
    span.event("noticed", now_s - 58.0)
    span.end(now_s)
    worked, part = kept.spans()["worked"], kept.spans()["part"]
    assert worked.start_time == part.start_time
    assert worked.start_time is not None and worked.end_time is not None
    assert worked.end_time - worked.start_time == pytest.approx(60e9, abs=1000)
    assert worked.events[0].timestamp - worked.start_time == pytest.approx(2e9, abs=1000)
    assert worked.end_time == pytest.approx(now_ns, abs=10e9)


def test_a_span_ends_once_and_its_error_shows(kept: Kept) -> None:
    span = kept.tracer.join(TraceContext(SAMPLED), "worked", 1.0)
    span.end(2.0, "the worker was lost")
    span.end(3.0)
    (worked,) = kept.exporter.get_finished_spans()
    assert not worked.status.is_ok
    assert worked.status.description == "the worker was lost"
    assert worked.start_time is not None and worked.end_time is not None
    assert worked.end_time - worked.start_time == pytest.approx(1e9, abs=1000)


class Collector:
    def __init__(self) -> None:
        self.n_spans = 0
        self.answers = threading.Event()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            there.answers.wait()
            request = ExportTraceServiceRequest.FromString(body)
            there.n_spans += sum(
                len(scope.spans) for each in request.resource_spans for scope in each.scope_spans
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    there = Collector()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        yield there
        there.answers.set()
        server.shutdown()


def end_a_span(tracer: OtelTracer) -> None:
    span = tracer.serve("asked", lambda name: [], 1.0)
    assert span is not None
    span.end(2.0)


async def test_what_waits_is_sent_at_the_end(collector: Collector) -> None:
    collector.answers.set()
    tracer = OtelTracer.open("halfmoon-test", "worker-7")
    for _ in range(20):
        end_a_span(tracer)
    assert collector.n_spans == 0
    await tracer.close()
    assert collector.n_spans == 20


async def test_a_silent_collector_does_not_hold_up_the_end(collector: Collector) -> None:
    tracer = OtelTracer.open("halfmoon-test", "worker-7")
    end_a_span(tracer)
    # The exporter's own patience is ten seconds, and it would try again.
    async with asyncio.timeout(9.0):
        await tracer.close()
    assert collector.n_spans == 0


def test_without_the_packages_services_start_and_say_what_is_missing() -> None:
    program = """
import sys
sys.modules["opentelemetry.sdk"] = sys.modules["opentelemetry.exporter"] = None
import halfmoon_conductor.app, halfmoon_prefill.app, halfmoon_decode.app, halfmoon_kvstore.app
from halfmoon_runtime.observability import tracer_setup
assert tracer_setup.open_tracer(tracer_setup.TracedSettings(), "halfmoon-test") is None
try:
    tracer_setup.open_tracer(tracer_setup.TracedSettings(traces=True), "halfmoon-test")
except tracer_setup.TracesUnavailable as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "pip install 'halfmoon-runtime[otel]'" in said.stdout
