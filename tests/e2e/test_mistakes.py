"""A user's mistake is answered by one line that names it and the way out, without a traceback."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.healthcheck import STATUS_FILE
from halfmoon_testing.models.llama_folders import (
    llama_tensors,
    make_llama,
    safetensors_bytes,
    write_files,
)
from tests.e2e.redis_server import RedisServer
from tests.installed_programs import needs_programs
from tests.programs import run_program

pytestmark = pytest.mark.e2e


class Mistake(NamedTuple):
    """A command line, with {port} for a port that is taken, and what is said of it."""

    words: str
    told: str
    status: int = 2


#: No machine has it: it is for documentation.
FAR = "192.0.2.1"
CONDUCTOR = "conductor --model fake://moon --metadata embedded --metadata-port {free2} --http-port"
KVSTORE = "kvstore --metadata memory://mistakes"
DECODE = "decode --model fake://moon --metadata memory://mistakes"
OPEN = f"--host (HALFMOON_HOST) is '{FAR}'"
SETTINGS = [
    Mistake(f"{CONDUCTOR} {{port}}", "http_port {port} on 127.0.0.1 can't be had", 1),
    Mistake(
        "conductor --model fake://moon --metadata embedded --http-port {free} --metadata-port"
        " {port}",
        "or choose another with --metadata-port",
        1,
    ),
    Mistake(f"{KVSTORE} --metrics-port {{port}}", "choose another with --metrics-port", 1),
    Mistake(f"{CONDUCTOR} {{free}} --tenants nowhere.toml", "tenants file nowhere.toml"),
    Mistake(f"{CONDUCTOR} {{free}} --tenants broken.toml", "tenants file broken.toml: Invalid"),
    Mistake(
        f"{CONDUCTOR} {{free}} --journal-path file/a", "journal_path 'file/a' can't be written"
    ),
    Mistake("decode --model fake://moon --metadata foo://x", "'foo://x' has no known scheme"),
    Mistake("kvstore --metadata foo://x", "'foo://x' has no known scheme"),
    Mistake(f"{KVSTORE} --disk-path file", "disk_path 'file' can't be used; name a folder"),
    Mistake(f"{KVSTORE} --disk-path . --disk-mib 99999999", "is more than the"),
    Mistake(f"{KVSTORE} --capacity-mib 99999999", "capacity_mib 99999999 can't be had", 1),
    Mistake(f"{DECODE} --pool-mib 99999999", "can't be had; ask for less: Cannot allocate", 1),
    Mistake("decode --model ./modle --metadata memory://x", "modle is not a folder"),
    Mistake(
        "decode --model lab/no-such --metadata memory://x",
        "'lab/no-such' is not a folder here, and as a hub id it can't be fetched",
    ),
    Mistake(
        "kvstore --metadata redis://127.0.0.1/0?password_file=nowhere",
        "password_file 'nowhere' can't be read: No such file",
    ),
    Mistake(f"{KVSTORE} --tls-cert nowhere --tls-key nowhere", "tls_cert 'nowhere' can't be read"),
    # Beyond loopback: tests/runtime/test_settings.py has the ways out that are named.
    Mistake(f"{KVSTORE} --host {FAR}", OPEN),
    Mistake(f"{CONDUCTOR} {{free}} --host {FAR}", OPEN),
    Mistake(f"{DECODE} --host {FAR}", OPEN),
    Mistake(
        f"{KVSTORE} --transfer-host 127.0.0.1,{FAR}", "--transfer-host (HALFMOON_TRANSFER_HOST)"
    ),
]
METADATA = "--metadata http://127.0.0.1:{free}/metadata"
#: Folders by name, and words of the line that names them.
REFUSED = {
    "nowhere": "is not a folder: nothing is there",
    "encoder": "it is an encoder",
    "quantised": "quantised with GPTQ",
    "gguf": "GGUF weights",
    "adapter": "adapter (LoRA",
    "code": "code of its own (auto_map",
    "truncated": "is cut off",
}
MODELS = [
    Mistake(f"{words.partition(' ')[0]} --model ./[red]/{name} {words.partition(' ')[2]}", told, 2)
    for words, names in (
        (f"prefill {METADATA}", REFUSED),
        (f"decode {METADATA}", ["encoder", "truncated"]),
        ("conductor --http-port {free} --metadata-port 0", ["nowhere", "gguf", "adapter"]),
        ("up --port {free}", REFUSED),
        ("profile --threads 1", ["nowhere", "code"]),
    )
    for name, told in REFUSED.items()
    if name in names
]
ENGINES = [
    Mistake("up --port {free} --engine vlm", "engine 'vlm' is not installed: there are torch"),
    Mistake(
        "up --port {free} -o prefill.engine=vllm"
        ' -o prefill.engine-options={{"tensor_parallel_size":"two"}}',
        "options of engine vllm: Expected `int`",
    ),
    Mistake(
        'up --port {free} -o decode.engine-options={{"enforce_eager":"true"}}',
        "engine torch has no options, ['enforce_eager'] were given",
    ),
    *(
        [
            Mistake(
                "up --port {free} -o decode.engine=vllm",
                "needs vllm 0.32.0, and none is installed: pip install",
            )
        ]
        if find_spec("vllm") is None
        else []
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which commands are run, with what they name."""
    (tmp_path / "file").touch()
    (tmp_path / "broken.toml").write_text("a = [")
    red = tmp_path / "[red]"  # brackets would be markup to what prints it
    make_llama(red / "encoder", model_type="bert")
    make_llama(red / "quantised", quantization_config={"quant_method": "gptq"})
    write_files(red / "gguf", model__gguf=b"GGUF")
    write_files(red / "adapter", adapter_config__json={"base_model_name_or_path": "lab/base"})
    make_llama(red / "code", model_type="mine", auto_map={"AutoModelForCausalLM": "code.Model"})
    weights = safetensors_bytes(llama_tensors())[:-100]
    write_files(make_llama(red / "truncated"), model__safetensors=weights)
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mistakes", [SETTINGS, MODELS, ENGINES], ids=["settings", "models", "engines"]
)
def test_each_mistake_is_one_line(folder: Path, taken_port: int, mistakes: list[Mistake]) -> None:
    status = folder / "status.json"
    keys = ("HALFMOON_CLUSTER_KEY", "HALFMOON_CLUSTER_KEY_FILE", "HALFMOON_ALLOW_OPEN_NETWORK")
    environment = {k: v for k, v in os.environ.items() if k not in keys} | {
        "COLUMNS": "200",
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        STATUS_FILE: str(status),
    }
    for mistake in mistakes:
        shutil.rmtree(folder / ".halfmoon", ignore_errors=True)
        ports = {"port": taken_port, "free": free_port(), "free2": free_port()}
        program, *words = mistake.words.format(**ports).split()
        module = f"halfmoon_{program}" if program not in ("up", "profile") else "halfmoon_cli"
        words = [program, *words] if module == "halfmoon_cli" else words
        ended = run_program(module, *words, joined=True, cwd=folder, env=environment)
        told, lines = mistake.told.format(port=taken_port), ended.stdout.splitlines()
        assert "Traceback" not in ended.stdout, ended.stdout
        if module == "halfmoon_cli":
            assert ended.returncode != 0, ended.stdout
            (one,) = [line for line in lines if line.startswith("halfmoon:")]
            assert told in one, (told, ended.stdout)
            # A type is known or not by transformers, which a worker asks.
            if mistakes is MODELS and told != REFUSED["code"]:
                assert len(lines) == 1, ended.stdout
                assert not (folder / ".halfmoon").exists(), "processes were started"
            continue
        said = [line for line in lines if not line.endswith("--help says what there is")]
        assert told in said[-1], (told, ended.stdout)
        assert ended.returncode == mistake.status, ended.stdout
        if mistakes is MODELS:
            assert sum(told in line for line in lines) == 1, ended.stdout
        if mistakes is MODELS and module != "halfmoon_conductor":
            record = json.loads(status.read_text())
            assert record["stage"] == "failed" and told in record["error"]


def test_who_allows_an_open_network_is_warned_in_the_log_and_who_has_a_key_is_not() -> None:
    words = ("--host", FAR, "--metrics-port", "-1", "--metadata", "memory://of-its-own")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HALFMOON_CLUSTER_KEY")}
    for own, is_warned in (
        ({"HALFMOON_ALLOW_OPEN_NETWORK": "True"}, True),
        ({"HALFMOON_CLUSTER_KEY": "a key of this cluster"}, False),
    ):
        ended = run_program("halfmoon_kvstore", *words, joined=True, env={**variables, **own})
        assert ("open network" in ended.stdout and FAR in ended.stdout) == is_warned, ended.stdout
        assert ended.returncode == 1  # it went on, as far as to listen


def test_the_rest_api_is_for_clients_and_may_listen_anywhere() -> None:
    flags = ["--model", "m", "--host", "0.0.0.0", "--metadata", "redis://10.0.0.9:6379/0"]
    assert ConductorSettings.from_args(flags).open_addresses == {}


@needs_programs("redis-server")
def test_a_service_whose_metadata_server_is_away_names_it_and_joins_once_it_is_there(
    tmp_path: Path,
) -> None:
    redis = RedisServer(tmp_path)
    redis.kill()
    words = ("--metadata", redis.url, "--model", "fake://moon", "--http-port", str(free_port()))
    spec = ProcessSpec("conductor-0", "conductor", (*words, "--metrics-port", "-1"))
    process = ServiceProcess(spec, tmp_path)

    def line_with(event: str) -> str:
        deadline = time.monotonic() + 120
        while not (found := [each for each in process.last_lines(200) if event in each]):
            assert process.exit_code is None and time.monotonic() < deadline, process.last_lines()
            time.sleep(0.05)
        return found[0]

    try:
        away = line_with("metadata server is away, still trying")
        assert redis.url in away and "Connection refused" in away
        redis.start()
        line_with("metadata server is back")
        line_with("ready")
    finally:
        process.signal(signal.SIGKILL)
        process.wait(20)
        redis.kill()
