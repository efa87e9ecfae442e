"""A stock `vllm serve` process that publishes KV events, which a test can kill."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.processes.vllm_server import VllmServer

#: Seconds until a server answers: a busy machine needs minutes.
READY_S = 400.0
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


class StockServer(VllmServer):
    """One server; `wait_until_ready` waits for it."""

    before = ("sh", "-c", _IN_THE_BACKGROUND, "sh")

    def __init__(
        self, model: Path, folder: Path, *flags: str, variables: Mapping[str, str] | None = None
    ) -> None:
        port = free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{free_port()}",
            "replay_endpoint": f"tcp://*:{free_port()}",
        }
        own = ["--served-model-name", "tiny", "--dtype", "float32", "--block-size", "32"]
        own += ["--max-model-len", "1024", "--kv-events-config", json.dumps(events)]
        variables = {"VLLM_SERVER_DEV_MODE": "0", **(variables or {})}
        log = folder / f"vllm-{port}.log"
        super().__init__(model, port, log, *own, *flags, variables=variables)

    def complete(self, prompt: Sequence[int], n_new: int, **fields: Any) -> dict[str, Any]:
        """Ask this server itself, greedily."""
        return complete(self.url, prompt, n_new, **fields)


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


def streamed(url: str, prompt: Sequence[int], n_new: int, **fields: Any) -> Iterator[list[int]]:
    """The tokens of each event of a stream."""
    request = body(prompt, n_new, stream=True, **fields)
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
        assert time.monotonic() < deadline, decode.log_end()
