"""Benchmarks that people run, unchanged, against a live cluster: all they sent was answered.

What they measured is only looked at for being there: no time is asserted.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmoon_simulator.workloads.workload_sources import find_traces

Run = Callable[..., Any]
PythonWith = Callable[..., Path]

pytestmark = [pytest.mark.timeout(1200)]

#: A trace's blocks are of 512 tokens; here they are of 16, which is also this cluster's block.
SHRINK = 32
#: Limits, in ms, for what benchmarks call goodput.
TTFT_MS, TPOT_MS = 2000, 500


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The first requests of Mooncake's conversation trace, with a 32nd of their tokens.

    Arrival times and the sharing of blocks are the trace's own: 60 requests in 15 s.
    """
    if not find_traces():
        pytest.skip("no published traces in ./traces or ../shared/traces")
    source = Path(find_traces()) / "conversation_trace.jsonl"
    requests = [json.loads(line) for line in source.read_text().splitlines()[:60]]
    for request in requests:
        for name in ("input_length", "output_length"):
            request[name] = -(-request[name] // SHRINK)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def requests_of(trace: Path) -> list[Any]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


def test_vllm_bench_serve_replays_a_mooncake_trace(
    run_client: Run, vllm: Path, served: Any, tmp_path: Path, trace: Path
) -> None:
    requests = requests_of(trace)
    before = served.metric("halfmoon_prompt_tokens_cached_total")
    run_client(
        vllm / "vllm", "bench", "serve", "--backend", "openai", "--base-url", served.url,
        "--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", served.model,
        "--dataset-name", "timed_trace", "--dataset-path", str(trace), "--self-timed",
        "--timed-trace-chunk-hash-size", str(512 // SHRINK),
        "--timed-trace-sec-multiplier", "0.001", "--num-prompts", str(len(requests)),
        "--request-id-prefix", "vllm-trace-", "--goodput", f"ttft:{TTFT_MS}", f"tpot:{TPOT_MS}",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
        "--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json",
        "--disable-tqdm", OPENAI_API_KEY=served.key, within_s=600,
    )  # fmt: skip
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["completed"], report["failed"]) == (len(requests), 0), report["errors"]
    assert not any(report["errors"])
    assert report["request_goodput"] is not None
    for each in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "p99_e2el_ms"):
        assert report[each] > 0
    assert report["input_lens"] == [each["input_length"] for each in requests]
    assert report["output_lens"] == [each["output_length"] for each in requests]
    assert served.metric("halfmoon_prompt_tokens_cached_total") > before
    answered = served.answered()
    assert all(answered[f"vllm-trace-{i}"] == 200 for i in range(len(requests)))


def test_aiperf_replays_a_mooncake_trace(
    run_client: Run, python_with: PythonWith, served: Any, tmp_path: Path, trace: Path
) -> None:
    requests = requests_of(trace)
    before = served.metric("halfmoon_prompt_tokens_cached_total")
    run_client(
        python_with("aiperf", "aiperf==0.13.0").with_name("aiperf"), "profile",
        "--model", "tiny", "--url", served.url, "--endpoint-type", "chat", "--streaming",
        "--api-key", served.key, "--tokenizer", as_hub_model(served.model, tmp_path / "hf"),
        "--custom-dataset-type", "mooncake_trace", "--input-file", trace,
        "--isl-block-size", str(512 // SHRINK),
        "--fixed-schedule", "--fixed-schedule-auto-offset", "--random-seed", "1",
        "--extra-inputs", "ignore_eos:true",
        # A random model's tokens are pieces of characters: as text they would be counted anew.
        "--use-server-token-count",
        "--goodput", f"time_to_first_token:{TTFT_MS} inter_token_latency:{TPOT_MS}",
        "--workers-max", "2", "--ui", "none", "--no-gpu-telemetry", "--export-level", "raw",
        "--output-artifact-dir", tmp_path / "out",
        HF_HOME=str(tmp_path / "hf"), within_s=600,
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == len(requests)
    assert report["request_error_rate"]["avg"] == 0
    assert not report["error_summary"]
    for each in ("time_to_first_token", "inter_token_latency", "goodput"):
        assert report[each]["avg"] is not None
    assert report["output_sequence_length"]["sum"] == sum(
        each["output_length"] for each in requests
    )
    assert report["total_usage_prompt_cache_read_tokens"]["avg"] > 0
    assert served.metric("halfmoon_prompt_tokens_cached_total") > before
    answered = served.answered()
    records = (tmp_path / "out" / "profile_export_raw.jsonl").read_text().splitlines()
    sent = [json.loads(record)["metadata"]["x_request_id"] for record in records]
    assert len(sent) == len(requests)
    assert all(answered[each] == 200 for each in sent)


def as_hub_model(model: Path, hf_home: Path) -> str:
    """A folder laid out as if the hub's client had fetched it, and its name there.

    aiperf takes no folder when it must not ask the hub: it checks that a name is one of the hub's.
    """
    revision = "0" * 40
    entry = hf_home / "hub" / "models--local--tiny"
    snapshot = entry / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, snapshot)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(revision)
    return "local/tiny"


def test_guidellm_at_a_constant_rate(
    run_client: Run, python_with: PythonWith, served: Any, tmp_path: Path
) -> None:
    n_requests, n_new = 24, 16
    slo = {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS}
    backend = {"kind": "openai_http", "target": served.url, "model": "tiny", "api_key": served.key}
    python = python_with("guidellm", "torch==2.13.0", "guidellm==0.8.1")
    run_client(
        python.with_name("guidellm"), "run", "--backend", json.dumps(backend),
        "--tokenizer", f"kind=hf_auto,model={served.model}",
        "--data", f"kind=synthetic_text,prompt_tokens=128,output_tokens={n_new}",
        "--profile", "kind=constant,rate=4",
        "--constraint", f"kind=max_requests,count={n_requests}",
        "--metrics", json.dumps({"kind": "generative", "slo": slo}),
        "--output", f"kind=json,path={tmp_path / 'out.json'}",
        HF_HOME=str(tmp_path / "hf"), within_s=600,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {
        "successful": n_requests, "errored": 0, "incomplete": 0, "total": n_requests,
    }  # fmt: skip
    new = metrics["output_token_count"]["successful"]
    assert (new["min"], new["max"]) == (n_new, n_new)
    for each in ("time_to_first_token_ms", "time_per_output_token_ms", "inter_token_latency_ms"):
        assert metrics[each]["successful"]["mean"] > 0
    assert metrics["request_goodput"] is not None
