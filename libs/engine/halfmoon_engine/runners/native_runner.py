"""Run a model's layers natively over an attached pool."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.attention.attention_probe import ProbedModel, allowed_error, logits_error
from halfmoon_engine.batch_checks import check_pool
from halfmoon_engine.interface import EngineStage, LayerHook, Run, StageActivations
from halfmoon_engine.native.decoder_reader import NotNative
from halfmoon_engine.native.native_batch import native_batch, open_native_pool
from halfmoon_engine.native.native_decoder import NativeDecoder
from halfmoon_engine.native.packed_decoder import PackedDecoder
from halfmoon_engine.stages.stage_checks import ACTIVATION_ITEM_BYTES, cut_layers
from halfmoon_models.pool_size import PoolRoom
from halfmoon_protocol.kv_layout import KvLayout

#: Tokens of a probe's first prompt that run before the rest of it.
_FIRST_CHUNK = 7


class NativeRunner:
    """A packed decoder, or its stage, over a pool of pages."""

    def __init__(self, native: Any, packed: PackedDecoder, layout: KvLayout) -> None:
        """Run packed layers over a pool of this layout, which has all layers."""
        self._native = native
        self._packed = packed
        self._decoder = NativeDecoder(native, packed)
        self._layout = layout
        self._pool: Any = None

    @property
    def description(self) -> str:
        """Name of what computes."""
        return f"{self._native.instruction_set()} kernels on {self._native.threads()} threads"

    @property
    def checks_pages(self) -> bool:
        """Always: thousands of pages are checked faster there."""
        return True

    def open_stage(self, index: int, n_stages: int) -> "tuple[EngineStage, NativeRunner]":
        """Return a runner of one stage over the packed weights of this one.

        Native layers take nothing but activations and positions, so every model can be cut.

        Raises:
            BadEngineStage: there is no such stage.
        """
        n_bytes = self._packed.hidden * ACTIVATION_ITEM_BYTES
        stage = cut_layers(self._layout.n_layers, n_bytes, index, n_stages)
        return stage, NativeRunner(self._native, self._packed.cut(stage), self._layout)

    def attach(self, memory: memoryview) -> int:
        """Use this memory as the pool."""
        check_pool(memory, self._layout)
        self._pool = open_native_pool(self._native, memory, self._layout)
        n_pages: int = self._pool.n_pages
        return n_pages

    def pool_room(self) -> PoolRoom:
        """Return that the pool is memory of the host."""
        return PoolRoom()

    def allocate_pool(self, n_bytes: int) -> None:
        """Return None: the pool is memory of the host."""

    def detach(self) -> None:
        """Release the attached memory."""
        self._pool = None

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
        """Run a batch; rows may come in any order and more than once."""
        batch = native_batch(self._native, self._pool, runs)
        end = max(run.start + len(run.token_ids) for run in runs)
        rises = bool((rows[1:] > rows[:-1]).all())
        wanted, places = (rows, None) if rises else np.unique(rows, return_inverse=True)
        logits = self._decoder.logits(
            batch, end, tokens, wanted, before_layer, after_layer, activations
        )
        return logits if places is None else logits[torch.from_numpy(places)]

    def check(self, probed: ProbedModel, dtype: torch.dtype) -> None:
        """Compare with what the model's probe gave: in chunks, and side by side.

        Raises:
            NotNative: this computes something else.
        """
        layout = self._layout
        first, *others = probed.prompts
        n_pages = [layout.blocks_for(len(prompt)) for prompt in probed.prompts]
        total = sum(n_pages)
        self.attach(memoryview(bytearray(total * layout.block_bytes)))
        # In reverse: memory that is read in order would not go unnoticed.
        pages = list(range(total))[::-1]
        own = [pages[sum(n_pages[:i]) : sum(n_pages[: i + 1])] for i in range(len(n_pages))]
        begun = [Run(first[:_FIRST_CHUNK].tolist(), 0, own[0], None)]
        rest = [
            Run(first[_FIRST_CHUNK:].tolist(), _FIRST_CHUNK, own[0], None),
            *(Run(prompt.tolist(), 0, own[i + 1], None) for i, prompt in enumerate(others)),
        ]
        rows = None if probed.incoming is None else torch.cat(probed.incoming)
        begins = None if rows is None else rows[:_FIRST_CHUNK]
        goes_on = None if rows is None else rows[_FIRST_CHUNK:]
        width = probed.logits.shape[1] if probed.leaves else 0
        try:
            logits = torch.cat(
                [self._all_rows(begun, begins, width), self._all_rows(rest, goes_on, width)]
            )
        finally:
            self.detach()
        error = logits_error(logits, probed)
        if not error <= allowed_error(dtype):
            raise NotNative(
                f"their native form computes something else: logits differ by {error:.3g} of "
                f"their spread, allowed is {allowed_error(dtype)}"
            )

    def _all_rows(
        self, runs: Sequence[Run], incoming: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        """Return what the probe compares: logits, or activations of this width."""
        tokens = np.concatenate([np.asarray(run.token_ids, dtype=np.int64) for run in runs])
        wanted = np.arange(0 if width else len(tokens))
        outgoing = np.empty((len(tokens), width), dtype=np.float32) if width else None
        activations = None
        if incoming is not None or outgoing is not None:
            activations = StageActivations(
                None if incoming is None else incoming.contiguous().numpy().data,
                None if outgoing is None else outgoing.data,
            )
        logits = self.logits(runs, tokens, wanted, None, None, activations)
        return logits if outgoing is None else torch.from_numpy(outgoing)
