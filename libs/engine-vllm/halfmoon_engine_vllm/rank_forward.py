"""Run forward passes over given pages inside of a vLLM worker, without vLLM's scheduler.

vLLM mixes `RankForward` into its worker of each rank (`worker_extension_cls`). Pages of the
attached memory are pages of vLLM's own cache too, by the same numbers. That cache mirrors the
memory, for the heads of this rank and in the layout of vLLM's kernels:

    others ──write──▶ host page ──read back──▶ vLLM's page ──▶ attention
                      host row  ◀───write──── keys and values of a layer

Keys and values are taken on their way into vLLM's cache (`do_kv_cache_update` of a layer), so no
kernel's layout has to be understood.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.interface import LayerHook
from halfmoon_engine_vllm.batch import PagedBatch
from halfmoon_engine_vllm.rank_lifetime import end_with_parent, leave_no_files
from halfmoon_engine_vllm.rank_steps import StepClient
from halfmoon_engine_vllm.shared_span import SharedSpan
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_vllm.head_rows import HeadRows
from halfmoon_vllm.layer_tap import CacheUpdate, keeps_plain_rows, layers_in_order, tap_layers

#: Tokens of the trial at start: enough for each kind of kernel, too few to be noticed.
_TRIED_TOKENS = 16

# vLLM imports this in each rank before it loads weights, and calls nothing here until all have.
end_with_parent()


@dataclass(frozen=True)
class CacheShape:
    """Describe what caches hold of each token, over all ranks."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Pass:
    """A forward pass under way: rows to read back and to write, and hooks to call."""

    read_slots: torch.Tensor
    read_rows: torch.Tensor
    rows: torch.Tensor
    part_filled_pages: torch.Tensor
    before_layer: LayerHook | None
    after_layer: LayerHook | None


class RankForward:
    """Methods that a vLLM worker gets beside its own."""

    model_runner: Any
    vllm_config: Any
    distributed_init_method: str

    def halfmoon_wrap_layers(self) -> tuple[CacheShape, str]:
        """Have each layer's keys and values pass through here.

        Returns:
            The shape of the cache over all ranks, and the name of vLLM's attention.

        Raises:
            NotImplementedError: layers that differ in shape, or that keep no keys and values.
        """
        runner = self.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        names = [name for group in groups for name in group.layer_names]
        self._layers = layers_in_order(runner.compilation_config.static_forward_context, names)
        total = self.vllm_config.model_config.get_total_num_kv_heads()
        shapes = {_cache_shape(layer, len(names), total) for layer in self._layers}
        if len(shapes) != 1:
            raise NotImplementedError(f"layers of {len(shapes)} shapes of KV; one is served")
        self._pass: _Pass | None = None
        tap_layers(self._layers, self._on_update)
        return shapes.pop(), runner.attn_groups[0][0].backend.get_name()

    def halfmoon_try_forward(self) -> None:
        """Run a few tokens without KV, so that an operation this machine lacks is found now.

        On CPUs, vLLM's own trial is left out where it compiles nothing.
        """
        self.model_runner._dummy_run(_TRIED_TOKENS)

    def halfmoon_attach(self, memory: memoryview | torch.Tensor, layout: KvLayout) -> int:
        """Mirror this memory in a cache of as many pages; return their number.

        Args:
            memory: of the host, or bytes of a device.
            layout: of a page's bytes.
        """
        n_heads = self._layers[0].num_kv_heads
        first = self._rank_of_heads(layout.n_kv_heads, n_heads) * n_heads
        self._layout = layout
        self._pool_rows = HeadRows(memory, layout, first, n_heads)
        for layer in self._layers:
            old = layer.kv_cache
            layer.kv_cache = old.new_zeros((self._pool_rows.n_pages, *old.shape[1:]))
        self.model_runner.kv_caches[:] = [layer.kv_cache for layer in self._layers]
        return self._pool_rows.n_pages

    def halfmoon_attach_span(self, span: SharedSpan, layout: KvLayout) -> int:
        """Map memory of the engine's process, and mirror it."""
        return self.halfmoon_attach(span.map(), layout)

    def halfmoon_leave_no_files(self) -> None:
        """Remove names of files by which ranks found each other; all have started."""
        if self.model_runner.device.type == "cpu":  # NCCL may come back to the store
            leave_no_files(self.distributed_init_method)

    def halfmoon_connect(self, path: str) -> None:
        """Connect to the engine's process, for the hooks of passes."""
        self._steps = StepClient(path)

    def halfmoon_detach(self) -> None:
        """Release the attached memory and the mirror."""
        del self._pool_rows
        for layer in self._layers:
            layer.kv_cache = layer.kv_cache[:1].clone()
        self.model_runner.kv_caches[:] = [layer.kv_cache for layer in self._layers]

    def halfmoon_forward_in_step(self, batch: PagedBatch, watched: bool) -> Any:
        """Run a batch of the engine's process; return logits at the first rank.

        Args:
            batch: the same for all ranks.
            watched: whether the engine's process has hooks.
        """
        steps = self._steps
        hooks = (steps.before_layer, steps.after_layer) if watched else (None, None)
        try:
            return self.halfmoon_forward(batch, *hooks)
        finally:
            steps.over()

    @torch.inference_mode()
    def halfmoon_forward(
        self, batch: PagedBatch, before_layer: LayerHook | None, after_layer: LayerHook | None
    ) -> Any:
        """Run a batch; return the logits of its wanted rows, [n_rows, vocab].

        Ranks but the first may return None.
        """
        from vllm.forward_context import set_forward_context

        runner, layout = self.model_runner, self._layout
        device, pool = runner.device, self._pool_rows.device
        common = _attention_inputs(batch, device)
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for groups in runner.attn_groups:
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                for name in group.layer_names:
                    metadata[name], slots[name] = built, common.slot_mapping
        self._pass = _Pass(
            read_slots=_on(device, batch.read_slots),
            read_rows=_on(pool, _base_rows(batch.read_slots, layout)),
            rows=_on(pool, _base_rows(batch.slots, layout)),
            part_filled_pages=_on(device, batch.part_filled_pages),
            before_layer=before_layer,
            after_layer=after_layer,
        )
        try:
            with set_forward_context(
                metadata, self.vllm_config, num_tokens=len(batch.tokens), slot_mapping=slots
            ):
                hidden = runner.model(
                    # Compiled graphs were traced with 32 bits, and do not check it again.
                    input_ids=_on(device, batch.tokens.astype(np.int32)),
                    positions=_on(device, batch.positions),
                    intermediate_tensors=None,
                    inputs_embeds=None,
                )
            if not len(batch.rows):  # gathering nothing from ranks divides by zero
                return hidden.new_empty((0, self.vllm_config.model_config.get_vocab_size()))
            return runner.model.compute_logits(hidden[_on(device, batch.rows)])
        finally:
            self._pass = None

    def _rank_of_heads(self, n_total: int, n_own: int) -> int:
        """Return which share of the KV heads this rank has, and note whether it writes them.

        With more ranks than heads, several ranks have the same head; the first one writes it.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        size = self.vllm_config.parallel_config.tensor_parallel_size
        replicas = max(1, size * n_own // n_total)
        share, replica = divmod(get_tensor_model_parallel_rank(), replicas)
        self._writes = replica == 0
        return int(share)

    def _on_update(
        self,
        index: int,
        update: CacheUpdate,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Stand in for a layer's update of its cache."""
        now = self._pass
        if now is None:  # vLLM warms up
            update(layer, key, value, kv_cache, slots)
            return
        if now.before_layer is not None:
            now.before_layer(index)
        if len(now.part_filled_pages):
            # What another sequence left there may be no number: it would spoil masked sums.
            kv_cache[now.part_filled_pages] = 0
        if len(now.read_slots):
            keys, values = self._pool_rows.read(index, now.read_rows)
            device = kv_cache.device
            update(layer, keys.to(device), values.to(device), kv_cache, now.read_slots)
        update(layer, key, value, kv_cache, slots)
        n, pool = len(now.rows), self._pool_rows.device
        if self._writes:
            self._pool_rows.write(index, now.rows, key[:n].to(pool), value[:n].to(pool))
        if now.after_layer is not None:
            if pool.type == "cuda":  # transfers read what kernels have written
                torch.cuda.current_stream(pool).synchronize()
            now.after_layer(index)


def _cache_shape(layer: Any, n_layers: int, n_kv_heads: int) -> CacheShape:
    if not keeps_plain_rows(layer):
        raise NotImplementedError(f"{type(layer).__name__} keeps no plain keys and values")
    if not layer.kv_cache.dtype.is_floating_point or layer.kv_cache.dtype.itemsize < 2:
        raise NotImplementedError(
            f"quantised keys and values ({layer.kv_cache.dtype}): a pool holds float32, bfloat16 "
            "or float16, so remove the cache's scheme from the checkpoint's quantization_config"
        )
    return CacheShape(n_layers, n_kv_heads, layer.head_size, layer.kv_cache.dtype)


def _on(device: torch.device, values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def _attention_inputs(batch: PagedBatch, device: torch.device) -> Any:
    """Return what vLLM's attention backends build their metadata from."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    row_starts = np.zeros(len(batch.lengths) + 1, dtype=np.int32)
    np.cumsum(batch.lengths, out=row_starts[1:])
    return CommonAttentionMetadata(
        query_start_loc=_on(device, row_starts),
        query_start_loc_cpu=torch.from_numpy(row_starts),
        seq_lens=_on(device, batch.ends.astype(np.int32)),
        num_reqs=len(batch.lengths),
        num_actual_tokens=len(batch.tokens),
        max_query_len=int(batch.lengths.max()),
        max_seq_len=int(batch.ends.max()),
        block_table_tensor=_on(device, batch.pages),
        slot_mapping=_on(device, batch.slots),
        positions=_on(device, batch.positions),
    )


def _base_rows(slots: NDArray[np.int64], layout: KvLayout) -> NDArray[np.int64]:
    """Return the rows of a `HostKvPool` of slots: those of keys of layer 0."""
    pages, places = np.divmod(slots, layout.block_size)
    rows: NDArray[np.int64] = pages * (layout.n_layers * 2 * layout.block_size) + places
    return rows
