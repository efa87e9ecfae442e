"""Compute a model's logits with vLLM: in this process, or by ranks in processes of their own."""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.attention.device_pool import device_room
from halfmoon_engine.interface import LayerHook, Run, StageActivations
from halfmoon_engine_vllm.batch import plan_batch
from halfmoon_engine_vllm.no_stages import no_stages
from halfmoon_engine_vllm.rank_steps import StepServer
from halfmoon_engine_vllm.shared_span import find_shared_span
from halfmoon_models.pool_size import PoolRoom
from halfmoon_protocol.kv_layout import KvLayout


class VllmRunner:
    """A model of vLLM over a pool of pages; keeps the contract of `ModelRunner`."""

    def __init__(self, executor: Any, layout: KvLayout, description: str) -> None:
        """Wrap a started executor of one rank, whose worker has `RankForward`."""
        self._rank: Any = executor.driver_worker.worker
        self._layout = layout
        self._description = description

    @property
    def description(self) -> str:
        """Name of what computes: vLLM with its release and attention backend."""
        return self._description

    @property
    def checks_pages(self) -> bool:
        """Pages are checked by the engine."""
        return False

    def open_stage(self, index: int, n_stages: int) -> NoReturn:
        """Raise BadEngineStage: vLLM computes all layers."""
        raise no_stages(index, n_stages)

    def attach(self, memory: memoryview) -> int:
        """Use this memory as the pool; vLLM's own cache mirrors it."""
        n_pages: int = self._rank.halfmoon_attach(memory, self._layout)
        return n_pages

    def pool_room(self) -> PoolRoom:
        """Return the room of the GPU; on the CPU, vLLM's cache is a second copy of the pool."""
        device = self._rank.model_runner.device
        return PoolRoom(n_host_copies=2) if device.type == "cpu" else device_room(device, 0)

    def allocate_pool(self, n_bytes: int) -> torch.Tensor | None:
        """Use memory of the GPU as the pool, so that keys and values never leave it."""
        device = self._rank.model_runner.device
        if device.type == "cpu":
            return None
        memory = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self._rank.halfmoon_attach(memory, self._layout)
        return memory

    def detach(self) -> None:
        """Release the attached memory and its mirror."""
        self._rank.halfmoon_detach()

    def check_alive(self) -> None:
        """Do nothing: this process computes."""

    def logits(
        self,
        runs: Sequence[Run],
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        before_layer: LayerHook | None,
        after_layer: LayerHook | None,
        activations: StageActivations | None,
    ) -> torch.Tensor:
        """Run a checked batch; return [n_rows, vocab]."""
        batch = plan_batch(runs, tokens, rows, self._layout.block_size)
        logits: torch.Tensor = self._rank.halfmoon_forward(batch, before_layer, after_layer)
        return logits


class VllmRanksRunner:
    """A model whose heads are shared among ranks, each a process of vLLM's executor."""

    def __init__(self, executor: Any, n_ranks: int, layout: KvLayout, description: str) -> None:
        """Connect to the ranks of a started executor, whose workers have `RankForward`."""
        self._executor = executor
        self._layout = layout
        self._description = description
        self._steps = StepServer()
        connected = executor.collective_rpc(
            "halfmoon_connect", args=(self._steps.path,), non_block=True
        )
        self._steps.accept(n_ranks)
        connected.result()

    @property
    def description(self) -> str:
        """Name of what computes: vLLM with its release, attention backend and ranks."""
        return self._description

    @property
    def checks_pages(self) -> bool:
        """Pages are checked by the engine."""
        return False

    def open_stage(self, index: int, n_stages: int) -> NoReturn:
        """Raise BadEngineStage: vLLM computes all layers."""
        raise no_stages(index, n_stages)

    def attach(self, memory: memoryview) -> int:
        """Use this memory as the pool; each rank maps it and mirrors its heads.

        Raises:
            ValueError: it holds no page, is read-only, or is private to this process.
        """
        span = find_shared_span(memory)
        counts = self._executor.collective_rpc("halfmoon_attach_span", args=(span, self._layout))
        return int(counts[0])

    def pool_room(self) -> PoolRoom:
        """Return that it is unknown: the ranks have memory of their own."""
        return PoolRoom(is_known=False)

    def allocate_pool(self, n_bytes: int) -> None:
        """Return None: ranks share memory of the host."""

    def detach(self) -> None:
        """Have all ranks release the memory."""
        self._executor.collective_rpc("halfmoon_detach")

    def check_alive(self) -> None:
        """Raise EngineLost if the process of a rank ended."""
        self._steps.check_alive()

    def logits(
        self,
        runs: Sequence[Run],
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        before_layer: LayerHook | None,
        after_layer: LayerHook | None,
        activations: StageActivations | None,
    ) -> torch.Tensor:
        """Run a checked batch; return [n_rows, vocab].

        Raises:
            EngineLost: the process of a rank ended.
        """
        self._steps.check_alive()
        batch = plan_batch(runs, tokens, rows, self._layout.block_size)
        watched = before_layer is not None or after_layer is not None
        answers = self._executor.collective_rpc(
            "halfmoon_forward_in_step", args=(batch, watched), non_block=True
        )
        self._steps.follow(self._layout.n_layers, before_layer, after_layer)
        logits: torch.Tensor = answers.result()[0]
        return logits
