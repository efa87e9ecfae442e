"""Every program that takes a model's folder ends with the one line that says why it is refused."""

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.healthcheck import STATUS_FILE
from halfmoon_testing.models.llama_folders import (
    llama_tensors,
    make_llama,
    safetensors_bytes,
    write_files,
)
from tests.programs import run_program

pytestmark = pytest.mark.e2e

#: Folders by name, and words of the line that names them.
REFUSED: Mapping[str, str] = {
    "nowhere": "is not a folder: nothing is there",
    "encoder": "it is an encoder",
    "quantised": "quantised with GPTQ",
    "gguf": "GGUF weights",
    "adapter": "adapter (LoRA",
    "code": "code of its own (auto_map",
    "truncated": "is cut off",
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "[red] model"  # brackets would be markup to what prints it
    weights = safetensors_bytes(llama_tensors())
    match request.param:
        case "encoder":
            make_llama(path, model_type="bert")
        case "quantised":
            make_llama(path, quantization_config={"quant_method": "gptq"})
        case "gguf":
            write_files(path, model__gguf=b"GGUF")
        case "adapter":
            write_files(path, adapter_config__json={"base_model_name_or_path": "lab/base"})
        case "code":
            make_llama(path, model_type="mine", auto_map={"AutoModelForCausalLM": "code.Model"})
        case "truncated":
            write_files(make_llama(path), model__safetensors=weights[:-100])
    return path


def run(*command: str, folder: Path, **environment: str) -> tuple[int, str]:
    env = {**os.environ, "COLUMNS": "200", **environment}
    done = run_program(*command, joined=True, cwd=folder.parent, env=env)
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("role", "folder"),
    [*(("prefill", name) for name in REFUSED), ("decode", "encoder"), ("decode", "truncated")],
    indirect=["folder"],
)
def test_a_worker_ends_with_one_line(
    folder: Path, role: str, request: pytest.FixtureRequest
) -> None:
    words = REFUSED[request.node.callspec.params["folder"]]
    status = folder.parent / "status.json"
    options = {STATUS_FILE: str(status)}
    metadata = f"http://127.0.0.1:{free_port()}/metadata"
    code, output = run(
        f"halfmoon_{role}", "--model", str(folder), "--metadata", metadata, folder=folder, **options
    )
    assert code == 2
    assert sum(words in line for line in output.splitlines()) == 1, output
    record: dict[str, Any] = json.loads(status.read_text())
    assert record["stage"] == "failed" and words in record["error"]


@pytest.mark.parametrize("folder", ["nowhere", "gguf", "adapter"], indirect=True)
def test_a_conductor_ends_with_one_line(folder: Path, request: pytest.FixtureRequest) -> None:
    words = REFUSED[request.node.callspec.params["folder"]]
    port = str(free_port())
    code, output = run(
        *("halfmoon_conductor", "--model", str(folder), "--http-port", port),
        *("--metadata-port", "0"),
        folder=folder,
    )
    assert code == 2
    assert sum(words in line for line in output.splitlines()) == 1, output


@pytest.mark.parametrize(
    ("command", "folder"),
    [*(("up", name) for name in REFUSED), ("profile", "nowhere"), ("profile", "code")],
    indirect=["folder"],
)
def test_the_command_line_ends_with_one_line(
    folder: Path, command: str, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["folder"]
    option = {"up": ["--port", str(free_port())], "profile": ["--threads", "1"]}[command]
    code, output = run("halfmoon_cli", command, "--model", str(folder), *option, folder=folder)
    assert code != 0
    said = [line for line in output.splitlines() if line.startswith("halfmoon:")]
    assert len(said) == 1 and REFUSED[name] in said[0], output
    if name != "code":  # a type is known or not by transformers, which a worker asks
        assert len(output.splitlines()) == 1, output
        assert not (folder.parent / ".halfmoon").exists(), "processes were started"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "vlm"], "engine 'vlm' is not installed: there are torch"),
        (
            [
                *("-o", "prefill.engine=vllm"),
                *("-o", 'prefill.engine-options={"tensor_parallel_size": "two"}'),
            ],
            "options of engine vllm: Expected `int`",
        ),
        (
            ["-o", 'decode.engine-options={"enforce_eager": "true"}'],
            "engine torch has no options, ['enforce_eager'] were given",
        ),
        pytest.param(
            ["-o", "decode.engine=vllm"],
            "needs vllm 0.32.0, and none is installed: pip install",
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed"),
        ),
    ],
)
def test_an_engine_that_can_t_start_ends_the_command_with_one_line(
    options: list[str], words: str, tmp_path: Path
) -> None:
    port = str(free_port())
    code, output = run("halfmoon_cli", "up", "--port", port, *options, folder=tmp_path / "model")
    assert code != 0
    said = [line for line in output.splitlines() if line.startswith("halfmoon:")]
    assert len(said) == 1 and words in said[0], output
