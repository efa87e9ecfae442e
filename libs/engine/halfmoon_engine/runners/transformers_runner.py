"""Run transformers' own modelling code with attention over pages.

The batch is one row of tokens, runs side by side; positions and the attention's plan separate them.
Attention is computed by torch, or by the native extension where there is one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.attention.device_pool import DeviceKvPool, device_room
from halfmoon_engine.attention.forward_plan import plan_forward, plan_native
from halfmoon_engine.attention.kv_pool import HostKvPool, KvPool
from halfmoon_engine.attention.paged_attention import ATTENTION_NAME, use_forward_plan
from halfmoon_engine.interface import EngineStage, LayerHook, Run, StageActivations
from halfmoon_engine.native.native_attention import NativeBatchAttention
from halfmoon_engine.native.native_batch import open_native_pool
from halfmoon_engine.stages.model_cut import cut_sharing, stage_of
from halfmoon_engine.stages.stage_model import StageModel, activation_rows
from halfmoon_engine.stages.stage_probe import check_cut
from halfmoon_models.pool_size import PoolRoom
from halfmoon_protocol.kv_layout import KvLayout


class TransformersRunner:
    """A model of transformers over a pool of pages."""

    def __init__(
        self, staged: StageModel, layout: KvLayout, *, mirror: bool = False, native: Any = None
    ) -> None:
        """Wrap a model that has our attention.

        Args:
            staged: the model, or what a stage has of it.
            layout: of the pool, which has all layers.
            mirror: keep a pool on the device beside the attached memory even where the
                device could read that memory.
            native: the extension's module; None: torch attends.
        """
        self._staged = staged
        self._layout = layout
        self._device: torch.device = staged.model.device
        self._mirror = mirror or self._device.type != "cpu"
        self._native = None if self._mirror else native
        self._pool: KvPool | None = None
        self._native_pool: Any = None

    @property
    def description(self) -> str:
        """Name of what computes."""
        if self._native is None:
            return "torch"
        return f"torch, attention by {self._native.instruction_set()} kernels"

    @property
    def checks_pages(self) -> bool:
        """Never: the caller checks them."""
        return False

    def open_stage(self, index: int, n_stages: int) -> "tuple[EngineStage, TransformersRunner]":
        """Return a runner of one stage over the tensors of this model.

        Raises:
            BadEngineStage: the model can't be cut so.
        """
        stage = stage_of(self._staged.model.config, index, n_stages)
        staged = StageModel(cut_sharing(self._staged.model, stage), stage)
        staged.model.set_attn_implementation("eager")
        check_cut(staged)
        staged.model.set_attn_implementation(ATTENTION_NAME)
        runner = TransformersRunner(staged, self._layout, mirror=self._mirror, native=self._native)
        return stage, runner

    def attach(self, memory: memoryview) -> int:
        """Use this memory as the pool; a device gets a mirror of the same size."""
        pool: KvPool = (
            DeviceKvPool(memory, self._layout, self._device)
            if self._mirror
            else HostKvPool(memory, self._layout)
        )
        if self._native is not None:
            self._native_pool = open_native_pool(self._native, memory, self._layout)
        self._pool = pool
        return pool.n_pages

    def pool_room(self) -> PoolRoom:
        """Return the room for a pool on the host, and for its mirror on the device."""
        if self._device.type == "cuda":
            return device_room(self._device)
        return PoolRoom(n_host_copies=2 if self._mirror else 1)

    def allocate_pool(self, n_bytes: int) -> None:
        """Return None: the pool is memory of the host."""

    def detach(self) -> None:
        """Release the attached memory."""
        self._pool = self._native_pool = None

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
        """Run a batch with the model's own head on the chosen rows."""
        assert self._pool is not None
        first_layer = self._staged.first_layer
        if self._native is None:
            plan = plan_forward(
                runs,
                self._layout,
                self._pool,
                self._device,
                self._staged.model.dtype,
                first_layer,
            )
        else:
            attention = NativeBatchAttention(self._native, self._native_pool, runs)
            plan = plan_native(self._pool, attention, first_layer)
        plan.before_layer, plan.after_layer = before_layer, after_layer
        positions = np.concatenate(
            [np.arange(run.start, run.start + len(run.token_ids)) for run in runs]
        )
        incoming, outgoing = activation_rows(activations, self._staged.hidden_size)
        with use_forward_plan(plan):
            out = self._staged.run(
                torch.from_numpy(tokens),
                torch.from_numpy(positions),
                incoming,
                torch.from_numpy(rows),
            )
        if outgoing is None:
            return out
        outgoing.copy_(out)
        return out.new_empty((0, 0))
