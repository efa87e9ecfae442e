"""Traces of real processes, as a collector gets them over OTLP/HTTP."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e

SLOW = "fake://slow?step_s=0.004&max_context=8192"


@dataclass(frozen=True)
class Span:
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    worker: str
    began_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]


@dataclass
class Collector:
    """Keeps all spans that it is sent."""

    url: str
    spans: list[Span] = field(default_factory=list)
    #: Told of each export.
    came: threading.Condition = field(default_factory=threading.Condition)

    def keep(self, spans: Iterable[Span]) -> None:
        with self.came:
            self.spans.extend(spans)
            self.came.notify_all()

    def trace(self, trace_id: str) -> list[Span]:
        with self.came:
            return [span for span in self.spans if span.trace_id == trace_id]

    def whole(self, trace_id: str, *, worked: bool = True) -> list[Span]:
        """A trace's spans, once the roots of its services' parts are there: they come last."""
        roots = {"POST /v1/completions"} | ({"prefill", "decode"} if worked else set())
        self.until(lambda: roots <= by_name(self.trace(trace_id)).keys())
        return self.trace(trace_id)

    def until(self, condition: Callable[[], bool], within_s: float = 120.0) -> None:
        with self.came:
            in_time = self.came.wait_for(condition, within_s)
            names = [(span.service, span.name) for span in self.spans]
        assert in_time, f"not within {within_s} s, spans: {names}"


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = attributes_of(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    service["service.name"],
                    service["service.instance.id"],
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    attributes_of(span.attributes),
                    {event.name: attributes_of(event.attributes) for event in span.events},
                )


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.keep(spans_of(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        kept = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield kept
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, collector: Collector) -> Iterator[LiveCluster]:
    """One whose processes export to the collector, soon."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HALFMOON_TRACES", "true")
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        # Where workers can share memory they do, from the first landing on.
        extra = {
            "prefill": ["--max-chunk-tokens", "512"],
            "decode": ["--transfer-grants", "off"],
        }
        with start_cluster(SLOW, n_decode=2, extra=extra) as cluster:
            yield cluster


def complete(cluster: LiveCluster, prompt: list[int], n_new: int, **headers: str) -> httpx.Response:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": n_new, "temperature": 0}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)


def trace_id_of(answer: httpx.Response) -> str:
    version, trace_id, _, flags = answer.headers["traceresponse"].split("-")
    assert version == "00"
    assert int(flags, 16) & 1, "it is sampled"
    return str(trace_id)


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def tree(spans: list[Span], of: str = "") -> dict[str, Any]:
    """Names by parentage, from the spans whose parent is none of these."""
    known = {span.span_id for span in spans}
    return {
        span.name: tree(spans, span.span_id)
        for span in spans
        if span.parent_id == of or (not of and span.parent_id not in known)
    }


WORKED = {
    "place": {},
    "reserve": {},
    "prefill": {"queue": {}, "compute": {"chunk": {}}, "landing": {}},
    "decode": {"wait for the landing": {}, "first step": {}, "steps": {}},
}


def test_a_request_is_one_trace_from_http_to_the_last_token(
    cluster: LiveCluster, collector: Collector
) -> None:
    prompt = list(range(600))
    first = complete(cluster, prompt, 5)
    cluster.until(lambda: cluster.ask(prompt, 1)[1] == 576)
    again = complete(cluster, [*prompt[:576], 7, 8, 9], 5)
    spans = collector.whole(trace_id_of(first))
    assert tree(spans) == {"POST /v1/completions": {"text_completion slow": {"try": WORKED}}}
    named = by_name(spans)
    (decision,) = [d for d in cluster.decisions() if d["request_id"] == first.json()["id"]]
    assert decision["trace_id"] == trace_id_of(first)
    assert (named["try"].service, named["try"].worker) == ("halfmoon-conductor", "conductor-0")
    assert (named["queue"].service, named["queue"].worker) == ("halfmoon-prefill", "prefill-0")
    assert named["steps"].service == "halfmoon-decode"
    assert named["steps"].worker == named["place"].attributes["halfmoon.decode"]
    # One machine, one clock: what is done for a stage is done within it.
    at = {span.span_id: span for span in spans}
    for span in spans:
        assert span.began_ns <= span.ended_ns
        if parent := at.get(span.parent_id):
            assert parent.began_ns <= span.began_ns <= span.ended_ns <= parent.ended_ns, (
                f"{span.name} is not within {parent.name}"
            )
    computing: dict[str, dict[str, Any]] = {
        "text_completion slow": {
            "gen_ai.usage.input_tokens": 600,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.response.finish_reasons": ["length"],
        },
        "POST /v1/completions": {"http.response.status_code": 200},
        "place": {"halfmoon.prefill": "prefill-0"},
        "compute": {"halfmoon.tokens": 600, "halfmoon.chunks": 2},
        "landing": {"halfmoon.path": ["shm"]},
        "steps": {"halfmoon.new_tokens": 3},
    }
    for name, expected in computing.items():
        assert expected.items() <= named[name].attributes.items(), name
    assert named["place"].attributes["halfmoon.estimate.ttft_s"] > 0
    assert named["landing"].attributes["halfmoon.bytes"] > 0
    # The second time most of it came from the kvstore.
    collector.until(lambda: "lease" in by_name(collector.trace(trace_id_of(again))))
    named = by_name(collector.whole(trace_id_of(again)))
    assert (named["lease"].service, named["lease"].worker) == ("halfmoon-kvstore", "kvstore-0")
    assert named["lease"].parent_id == named["try"].span_id
    caching: dict[str, dict[str, Any]] = {
        "lease": {"halfmoon.blocks": 9, "halfmoon.blocks_from_disk": 0},
        "fetch": {
            "halfmoon.blocks": 9,
            "halfmoon.blocks_from_disk": 0,
            "halfmoon.source": "kvstore-0",
        },
        "prefill": {"halfmoon.cached_tokens": 576},
        "compute": {"halfmoon.tokens": 3},
        "text_completion slow": {"gen_ai.usage.cache_read.input_tokens": 576},
    }
    for name, expected in caching.items():
        assert expected.items() <= named[name].attributes.items(), name
    assert named["fetch"].attributes["halfmoon.bytes"] > 0


def test_a_refused_request_says_why(cluster: LiveCluster, collector: Collector) -> None:
    answer = complete(cluster, list(range(900)), 5, **{"x-ttft-slo-s": "0.000001"})
    assert answer.status_code == 429
    spans = by_name(collector.whole(trace_id_of(answer), worked=False))
    reason = answer.json()["error"]["message"]
    assert spans["try"].attributes["halfmoon.reject.kind"] == "overloaded"
    assert spans["try"].attributes["halfmoon.reject.reason"] == reason
    assert spans["place"].attributes["halfmoon.outcome"] == "refused"
    assert spans["text_completion slow"].failed
    assert not spans["POST /v1/completions"].failed  # 429 is the client's to handle


def test_a_killed_decode_shows_and_the_trace_goes_on_with_the_next_try(
    cluster: LiveCluster, collector: Collector
) -> None:
    n_new = 1500  # six seconds: the answer is not over when its client has read a little of it
    body = {"model": cluster.model, "prompt": [1, 2, 3], "max_tokens": n_new, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        trace_id = answer.headers["traceresponse"].split("-")[1]
        for n_lines, line in enumerate(answer.iter_lines()):
            if n_lines == 4:
                decode = str(cluster.decisions()[-1]["placement"]["decode"])
                cluster.process(decode).signal(signal.SIGKILL)
            assert "error" not in line
    collector.until(lambda: [s.name for s in collector.trace(trace_id)].count("prefill") == 2)
    spans = collector.whole(trace_id)
    lost, after = sorted((s for s in spans if s.name == "try"), key=lambda span: span.began_ns)
    assert lost.failed
    assert not after.failed
    assert decode in lost.events["lost"]["halfmoon.reason"]
    generation = by_name(spans)["text_completion slow"]
    assert "placed again" in generation.events
    assert generation.attributes["gen_ai.usage.output_tokens"] == n_new
    assert (lost.parent_id, after.parent_id) == (generation.span_id, generation.span_id)
    # Who was killed told nothing; who went on did.
    (went_on,) = (span for span in spans if span.name == "decode")
    assert went_on.parent_id == after.span_id
    assert went_on.worker != decode
    prefills = [span.parent_id for span in spans if span.name == "prefill"]
    assert sorted(prefills) == sorted([lost.span_id, after.span_id])
