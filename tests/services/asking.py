"""What tests say to workers in the place of a conductor, and engines that wait for them."""

import threading
from collections.abc import Sequence
from typing import Any

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_engine.interface import Run, TokenResult
from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import KvstoreAddress, ReserveDecode, StartDecode, StartPrefill
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.worker.message_loop import FAILED_MESSAGES
from halfmoon_testing.worker_caller import WorkerCaller

ORACLE = FakeEngine()
LAYOUT = ORACLE.layout
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=1.0, seed=5, repetition_penalty=1.1)
#: So slow that a test may do something before the last token.
SLOW = FakeModelSpec(step_s=0.005)


def prompt_of(n: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 131) % 990 for i in range(n)]


def chain_of(prompt: Sequence[int], salt: str = "") -> tuple[BlockHash, ...]:
    """The hashes of a prompt's whole blocks."""
    hashes = block_hashes(prompt, model=LAYOUT.model, salt=salt, block_size=LAYOUT.block_size)
    return tuple(hashes)


def reserve(request_id: str, n_tokens: int, n_new: int = 8, **more: Any) -> ReserveDecode:
    stopping = Stopping(max_new_tokens=n_new)
    return ReserveDecode(
        request_id=RequestId(request_id), n_tokens=n_tokens, stopping=stopping, **more
    )


def start_prefill(
    request_id: str, tokens: Sequence[int], landing: Landing, n_new: int = 8, **more: Any
) -> StartPrefill:
    fields: dict[str, Any] = {
        "token_ids": tuple(tokens),
        "n_prompt": max(1, len(tokens)),
        "block_hashes": (),
        "landing": landing,
        "landing_expires_s": 60.0,
        "sampling": GREEDY,
        "stopping": Stopping(max_new_tokens=n_new),
    }
    return StartPrefill(request_id=RequestId(request_id), **(fields | more))


def start_decode(
    request_id: str, first_token: int, n_prompt: int, n_new: int = 8, **more: Any
) -> StartDecode:
    fields: dict[str, Any] = {
        "n_prompt": n_prompt,
        "sampling": GREEDY,
        "stopping": Stopping(max_new_tokens=n_new),
    }
    return StartDecode(request_id=RequestId(request_id), first_token=first_token, **(fields | more))


async def dial(cluster: Any, name: str) -> WorkerCaller:
    """A connection to a worker."""
    return await WorkerCaller.dial(cluster.network, cluster.worker(name).info.commands)


def address_of(cluster: Any, name: str = "kvstore-0") -> KvstoreAddress:
    info = cluster.worker(name).info
    return KvstoreAddress(WorkerId(name), info.generation, info.commands)


def n_failed() -> float:
    """Messages that only the last line of defence has caught."""
    samples = (s for m in FAILED_MESSAGES.collect() for s in m.samples)
    return sum(s.value for s in samples if s.name.endswith("_total"))


class GatedEngine(FakeEngine):
    """Stands still at a forward pass while a gate is shut: at any, at prompts, or at steps."""

    def __init__(self, model: FakeModelSpec | None = None) -> None:
        super().__init__(model)
        self.gate, self.prompt_gate, self.step_gate = (threading.Event() for _ in range(3))
        for gate in (self.gate, self.prompt_gate, self.step_gate):
            gate.set()
        #: Whether a pass, or one of a prompt, has begun.
        self.inside, self.in_prompt = threading.Event(), threading.Event()
        #: Lengths of each pass's runs.
        self.passes: list[list[int]] = []
        #: Passes of prompts that raise an error.
        self.n_failing = 0

    def forward(self, runs: Sequence[Run], **hooks: Any) -> list[TokenResult | None]:
        self.passes.append([len(run.token_ids) for run in runs])
        self.inside.set()
        is_prompt = any(hook is not None for hook in hooks.values())
        if is_prompt:
            self.in_prompt.set()
        for gate in (self.gate, self.prompt_gate if is_prompt else self.step_gate):
            assert gate.wait(90)
        if is_prompt and self.n_failing:
            self.n_failing -= 1
            raise RuntimeError("out of memory")
        return super().forward(runs, **hooks)
