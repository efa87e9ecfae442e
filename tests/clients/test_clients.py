"""Clients that people use, unchanged, against a live cluster."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
PythonWith = Callable[..., Path]
Program = Callable[[str], Path]

pytestmark = [pytest.mark.timeout(1800)]


#: Programs by what they are clients with: the packages of their environment; None: ours.
PYTHON: dict[str, tuple[str, ...] | None] = {
    "openai_python": None,
    "anthropic_python": ("anthropic", "anthropic==2.11.0"),
    "litellm_python": ("litellm", "litellm"),
    "langchain_python": ("langchain", "langchain-openai"),
    "openai_agents": ("openai-agents", "openai-agents"),
    "pydantic_ai_python": ("pydantic-ai", "pydantic-ai-slim[openai]"),
    "instructor_python": ("instructor", "instructor==1.17.0"),
    "llama_index_python": ("llama-index", "llama-index-llms-openai-like==0.8.1"),
}
NODE = {
    "openai_node": ("openai", "openai@7.55.0"),
    # The newest major version of `ai` that Node 20 runs, and the providers of its time.
    "ai_sdk": (
        "ai-sdk", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/openai@3.0.141",
        "zod@4.6.7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PYTHON)
def test_a_client_for_python_has_what_it_asks_for(
    run_client: Run, python_with: PythonWith, program: Program, name: str
) -> None:
    environment = PYTHON[name]
    python = sys.executable if environment is None else python_with(*environment)
    run_client(python, program(f"{name}.py"), LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.mark.parametrize("name", NODE)
def test_a_client_for_node_has_what_it_asks_for(
    run_client: Run, node_with: Callable[..., Path], program: Program, name: str
) -> None:
    # A module finds its packages from where it lies.
    script = node_with(*NODE[name]) / "client.mjs"
    script.write_text(program(f"{name}.mjs").read_text())
    run_client("node", script)


def test_lm_eval_scores_a_local_task(
    run_client: Run, python_with: PythonWith, served: Any, tmp_path: Path
) -> None:
    python = python_with("lm-eval", "lm-eval[api]==0.4.13", "transformers", "datasets")
    questions = [
        {"question": f"After {a} comes", "choices": [f" {a + 1}", " moon"], "gold": 0}
        for a in range(6)
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tmp_path / "counting.yaml").write_text(
        "task: counting\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: question\n"
        "doc_to_choice: choices\n"
        "doc_to_target: gold\n"
        "metric_list:\n  - metric: acc\n"
    )
    endpoint = f"base_url={served.url}/v1/completions"
    tokenizer = f"tokenizer={served.model},tokenizer_backend=huggingface"
    run_client(
        python.with_name("lm_eval"), "--model", "local-completions",
        "--model_args", f"model=tiny,{endpoint},{tokenizer},num_concurrent=2",
        "--include_path", tmp_path, "--tasks", "counting",
        "--output_path", tmp_path / "out", "--log_samples",
        OPENAI_API_KEY=served.key, HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    (report,) = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(report.read_text())["results"]["counting"]["acc,none"] <= 1
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    for line in samples.read_text().splitlines():
        for (loglikelihood, _is_greedy), *_ in json.loads(line)["resps"]:
            assert float(loglikelihood) < 0


@pytest.mark.parametrize("door", ["open", "guarded"])
def test_schemathesis_finds_nothing(
    run_client: Run, python_with: PythonWith, served: Any, tmp_path: Path, door: str
) -> None:
    python = python_with("schemathesis", "schemathesis==4.32.5")
    # Rules between fields (min_tokens is not over max_tokens) are not in the schema, so a body
    # that it allows may be a 400; an event that no stream has is a 409 or a 422. That each field
    # by itself is as the schema says is held by tests/conductor/test_openapi.py. A list with more
    # items than allowed may also be more bytes than allowed, which is found first.
    (tmp_path / "schemathesis.toml").write_text(
        "[checks]\npositive_data_acceptance.expected-statuses = "
        '["2xx", "400", "401", "403", "404", "409", "422", "429", "5xx"]\n'
        "negative_data_rejection.expected-statuses = "
        '["400", "401", "403", "404", "405", "409", "413", "415", "422", "429", "5xx"]\n'
    )
    url = served.open_url if door == "open" else served.url
    keys = [] if door == "open" else ["-H", f"Authorization: Bearer {served.key}"]
    # All its phases: examples, coverage, fuzzing, stateful.
    run_client(
        python.with_name("schemathesis"), "run", f"{url}/openapi.json", *keys,
        "-n", "50", "--seed", "1", "--report", "json", "--report-json-path", tmp_path / "r.json",
        cwd=tmp_path, within_s=1500,
    )  # fmt: skip
