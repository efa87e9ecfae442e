"""A stock `vllm serve` process that publishes KV events, which a test can kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound

#: Seconds until a server answers: a busy machine needs minutes.
READY_S = 400.0
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Servers with NIXL poll even when idle. Three of them on two cores stop other processes for
#: seconds, longer than heartbeats wait; a lower weight of their session prevents it.
_IN_THE_BACKGROUND = 'echo 10 > /proc/self/autogroup; exec nice -n 10 "$@"'
#: What makes two servers a prefill/decode pair.
NIXL_FLAGS = (
    "--kv-transfer-config",
    # With fewer threads that poll: an idle server takes a core and more with the four by default.
    '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",'
    ' "kv_connector_extra_config": {"num_threads": 1}}',
)


def nixl_variables() -> dict[str, str]:
    """The environment of one server of a pair."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp",
    }


class StockServer:
    """One server; `wait_until_ready` waits for it."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"vllm-{self.port}.log"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        command = ["sh", "-c", _IN_THE_BACKGROUND, "sh"]
        command += [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--served-model-name", "tiny", "--dtype", "float32", "--block-size", "32"]
        command += ["--max-model-len", "1024", "--enable-prompt-tokens-details"]
        command += ["--kv-events-config", json.dumps(events), *flags]
        self._command = command
        self._environment = {**os.environ, **_ENVIRONMENT, **(variables or {})}
        self.start()

    def start(self) -> None:
        """Start the process, at its ports; also after it was killed."""
        with self._log.open("a") as log:
            self.process = start_bound(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._answers():
            assert self.process.poll() is None, self.last_log()
            assert time.monotonic() < deadline, self.last_log()
            time.sleep(0.2)

    def last_log(self) -> str:
        return self._log.read_text(errors="replace")[-5000:]

    def complete(self, prompt: Sequence[int], n_new: int, **fields: Any) -> dict[str, Any]:
        """Ask this server itself, greedily."""
        return complete(self.url, prompt, n_new, **fields)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def kill(self) -> None:
        """End all of its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False


def body(prompt: Sequence[int], n_new: int, **fields: Any) -> dict[str, Any]:
    """A greedy request for token ids."""
    return {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": n_new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def complete(url: str, prompt: Sequence[int], n_new: int, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body(prompt, n_new, **fields), timeout=300)
    assert answer.status_code == 200, answer.text
    completion = answer.json()
    assert isinstance(completion, dict)
    return completion


def streamed(url: str, prompt: Sequence[int], n_new: int) -> Iterator[list[int]]:
    """The tokens of each event of a stream."""
    request = body(prompt, n_new, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=300) as answer:
        assert answer.status_code == 200, answer.read().decode()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield from (choice["token_ids"] for choice in event["choices"])


def tokens_of(completion: dict[str, Any]) -> list[int]:
    return [int(token) for token in completion["choices"][0]["token_ids"]]


#: Pairs of processes that have met.
_MET: set[tuple[int, int]] = set()


def meet(prefill: StockServer, decode: StockServer) -> None:
    """Send a prompt through a pair until it is answered, unless they have met before.

    NIXL gives up a first meeting after 5 s, which a busy machine may need.
    """
    pair = prefill.process.pid, decode.process.pid
    if pair in _MET:
        return
    deadline = time.monotonic() + READY_S
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    prompt = [7] * 40
    while True:
        first = prefill.complete(prompt, 1, kv_transfer_params=remote)
        second = body(prompt, 2, kv_transfer_params=first["kv_transfer_params"])
        answer = httpx.post(f"{decode.url}/v1/completions", json=second, timeout=300)
        if answer.is_success:
            _MET.add(pair)
            return
        assert time.monotonic() < deadline, decode.last_log()
