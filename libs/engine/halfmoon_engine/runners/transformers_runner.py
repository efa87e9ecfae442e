"""Run transformers' own modelling code with attention over pages.

The batch is one row of tokens, runs side by side; positions and the attention's plan separate them.
Attention is computed by torch, or by the native extension where there is one.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.attention.device_pool import DeviceKvPool
from halfmoon_engine.attention.forward_plan import plan_forward, plan_native
from halfmoon_engine.attention.kv_pool import HostKvPool, KvPool
from halfmoon_engine.attention.paged_attention import use_forward_plan
from halfmoon_engine.interface import LayerHook, Run
from halfmoon_engine.native.native_attention import NativeBatchAttention
from halfmoon_engine.native.native_batch import open_native_pool
from halfmoon_protocol.kv_layout import KvLayout


class TransformersRunner:
    """A model of transformers over a pool of pages."""

    def __init__(
        self, model: Any, layout: KvLayout, *, mirror: bool = False, native: Any | None = None
    ) -> None:
        """Wrap a model that has our attention.

        Args:
            model: in evaluation mode, on its device.
            layout: of the pool.
            mirror: keep a pool on the device beside the attached memory even where the
                device could read that memory.
            native: the extension's module; None: torch attends.
        """
        self._model = model
        self._layout = layout
        self._device: torch.device = model.device
        self._mirror = mirror or self._device.type != "cpu"
        self._native = None if self._mirror else native
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
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
    ) -> torch.Tensor:
        """Run a batch with the model's own head on the chosen rows."""
        assert self._pool is not None
        if self._native is None:
            plan = plan_forward(runs, self._layout, self._pool, self._device, self._model.dtype)
        else:
            attention = NativeBatchAttention(self._native, self._native_pool, runs)
            plan = plan_native(self._pool, attention)
        plan.before_layer, plan.after_layer = before_layer, after_layer
        positions = np.concatenate(
            [np.arange(run.start, run.start + len(run.token_ids)) for run in runs]
        )
        kept = torch.from_numpy(rows).to(self._device)
        options = {"logits_to_keep": kept} if self._selects_logits else {}
        with use_forward_plan(plan):
            out = self._model(
                input_ids=torch.from_numpy(tokens)[None].to(self._device),
                position_ids=torch.from_numpy(positions)[None].to(self._device),
                use_cache=False,
                **options,
            )
        logits: torch.Tensor = out.logits[0]
        return logits if self._selects_logits else logits[kept]
