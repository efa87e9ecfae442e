"""Run stock vLLM servers as processes, for tests and benchmarks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from halfmoon_sandbox.bound_process import start_bound

#: Seconds until a server answers; a busy machine needs two minutes.
_READY_S = 400.0
#: Environment of vLLM on a machine without a GPU, where several processes share the cores.
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for reset_own_cache
}


class VllmServer:
    """One `vllm serve` of this Python's environment, and calls of its API."""

    #: Words before the command.
    before: Sequence[str] = ()

    def __init__(
        self,
        model: Path,
        port: int,
        log: Path,
        *flags: str,
        connector: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server; `wait_until_ready` waits for it.

        Args:
            model: folder of the model.
            port: a free one of this machine.
            log: file for its output.
            flags: further ones of `vllm serve`.
            connector: `kv_connector_extra_config` of Halfmoon's connector; None: without it.
            variables: further ones of its environment.
        """
        self.model, self.log = model, log
        self.url = f"http://127.0.0.1:{port}"
        command = [*self.before, str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *flags]
        command += ["--enable-prompt-tokens-details"]
        if connector is not None:
            config = {
                "kv_connector": "HalfmoonConnector",
                "kv_connector_module_path": "halfmoon_vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector,
            }
            command += ["--kv-transfer-config", json.dumps(config)]
        self._command = command
        self._environment = {**os.environ, **_ENVIRONMENT, **(variables or {})}
        log.write_bytes(b"")
        self.start()

    def start(self) -> None:
        """Start the process; also again, after it was killed."""
        with self.log.open("a") as file:
            self.process = start_bound(
                self._command,
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of its log.
        """
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the vLLM server is not there:\n{self.log_end()}")
            time.sleep(0.2)

    def wait_until_ended(self) -> int:
        """Wait until the server has ended; return its status."""
        return self.process.wait(_READY_S)

    def log_end(self, n_chars: int = 6000) -> str:
        """Return the end of its output."""
        return self.log.read_text(errors="replace")[-n_chars:]

    def complete(self, prompt: Sequence[int], n_new: int, **fields: Any) -> dict[str, Any]:
        """Complete a prompt greedily; return the answer with the ids of its tokens."""
        body = {
            "model": str(self.model),
            "prompt": list(prompt),
            "max_tokens": n_new,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300, trust_env=False)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def tokens(self, prompt: Sequence[int], n_new: int, **fields: Any) -> list[int]:
        """Return the tokens that follow a prompt, greedily."""
        ids: list[int] = self.complete(prompt, n_new, **fields)["choices"][0]["token_ids"]
        return ids

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric that have these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text
        total = 0.0
        for line in text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(
                f'{label}="{value}"' in line for label, value in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def reset_own_cache(self) -> None:
        """Empty vLLM's own prefix cache; the pool keeps its blocks."""
        answer = httpx.post(f"{self.url}/reset_prefix_cache", timeout=60, trust_env=False)
        answer.raise_for_status()

    def kill(self) -> None:
        """Kill the server and its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> None:
        """End the server; kill what does not end in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success
        except httpx.HTTPError:
            return False
