"""Clients, orders and views of clusters whose workers change their role."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from halfmoon_metadata import open_store
from halfmoon_protocol.ids import ConductorId, WorkerId
from halfmoon_protocol.messages import ChangeRole, Hello, Role, Welcome, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import list_members

#: Flags of a worker that changes whenever a conductor says so.
FLEXIBLE = [
    *("--dtype", "float32", "--block-size", "16", "--pool-mib", "32", "--no-measure"),
    *("--roles", "prefill,decode", "--role-cooldown-s", "0", "--drain-s", "120"),
]


class Transformers:
    """What transformers itself says, in one process alone."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None  # our requests ignore it

    def generate(self, prompt: Sequence[int], n_new: int) -> list[int]:
        out = self._model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=n_new, pad_token_id=0
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def require_greedy(self, prompt: Sequence[int], tokens: Sequence[int], n_new: int) -> None:
        """Each token is the likeliest one after those before it: `generate`, in one pass."""
        assert len(tokens) == n_new
        logits = self._model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == list(tokens)


def prompt_of(n: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [11 + salt % 300, 11 + salt // 300, *(10 + (i * 37) % 300 for i in range(n - 2))]


class BrokenStream(Exception):
    """A stream that ended without its last token; the text says how."""


def stream(
    cluster: Any,
    prompt: Sequence[int],
    n_new: int,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """The tokens of a greedy answer as they came; `on_tokens` is told how many there are.

    Raises:
        BrokenStream: it ended with an error, or its connection did.
    """
    body = {
        "model": cluster.model,
        "prompt": list(prompt),
        "max_tokens": n_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    try:
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=150) as said:
            if said.status_code != 200:
                raise BrokenStream(said.read().decode())
            for line in said.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return tokens
                if line.startswith("data: "):
                    event = json.loads(data)
                    if "error" in event:
                        raise BrokenStream(data)
                    tokens += [t for choice in event["choices"] for t in choice["token_ids"]]
                    on_tokens(len(tokens))
    except httpx.HTTPError as error:
        raise BrokenStream(f"{type(error).__name__} after {len(tokens)} tokens") from error
    raise BrokenStream(f"no [DONE] after {len(tokens)} tokens")


def workers(cluster: Any) -> dict[str, dict[str, Any]]:
    """What the conductor knows of each worker; nothing while it does not answer."""
    try:
        found = cluster.get("/debug/cluster")["workers"]
    except httpx.HTTPError:
        return {}
    return {worker["worker_id"]: worker for worker in found}


def members_of(cluster: Any, role: str) -> set[str]:
    """Workers that the conductor sends requests of this role."""
    there = workers(cluster).values()
    return {w["worker_id"] for w in there if w["role"] == role and not w["draining"]}


def metrics(cluster: Any, worker_id: str, **labels: str) -> dict[str, float]:
    """Values of one worker, those of all sets of labels that include `labels` added up."""
    page = httpx.get(f"{cluster.process(worker_id).status['operators']}/metrics", timeout=10).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def require_one_load(cluster: Any, worker_id: str, n_changes: int) -> None:
    """The process loaded its model once, however often its worker changed."""
    found = metrics(cluster, worker_id)
    assert found["halfmoon_model_loads_total"] == 1
    assert found["halfmoon_role_changes_total"] == n_changes
    n_phases = 3
    assert found["halfmoon_role_change_seconds_count"] == n_phases * n_changes
    text = cluster.process(worker_id).log_path.read_text()
    assert sum('"loading"' in line or " loading " in line for line in text.splitlines()) == 1


def order_role(cluster: Any, worker_id: str, role: Role) -> WorkerInfo:
    """Order a change as a further conductor would; return the record once the worker drains."""
    return asyncio.run(_order_role(cluster.cluster.plan, WorkerId(worker_id), role))


async def _order_role(plan: Any, worker_id: WorkerId, role: Role) -> WorkerInfo:
    store = open_store(plan.metadata_url)
    network = ZmqNetwork()
    try:
        info = (await list_members(store))[worker_id]
        link = await network.dial(info.commands, info.events, key_id=info.key_id)
        link.send_now(Hello(conductor_id=ConductorId("another"), session=1))
        link.send_now(ChangeRole(role=role, reason="a test"))
        async with asyncio.timeout(60):
            while True:
                message = await link.receive()
                if isinstance(message, Welcome) and message.worker.draining:
                    return message.worker
    finally:
        await network.close()
        store.close()
