"""Have the keys and values of vLLM's layers pass through a hook on their way into its cache.

vLLM's kernels keep keys and values in layouts of their own. At `do_kv_cache_update` they are still
plain rows, one per token, so no kernel's layout has to be understood.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch


class CacheUpdate(Protocol):
    """Write keys and values into a layer's cache, as vLLM does."""

    def __call__(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write rows [n, heads, head_dim] to slots [n]; a negative slot is padding."""
        ...


class UpdateHook(Protocol):
    """Stand in for the update of a layer's cache."""

    def __call__(
        self,
        index: int,
        update: CacheUpdate,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Handle the rows of layer number `index`; call `update` to write them."""
        ...


def layers_in_order(context: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """Return attention layers by their place in the model.

    Args:
        context: vLLM's `static_forward_context`.
        names: of the layers.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    return [context[name] for name in sorted(names, key=extract_layer_index)]


def keeps_plain_rows(layer: Any) -> bool:
    """Return whether a layer keeps one key and one value of equal size per token and head."""
    value_size = getattr(layer, "head_size_v", layer.head_size)
    return layer.head_size == value_size and hasattr(layer.impl, "do_kv_cache_update")


def tap_layers(layers: Sequence[Any], hook: UpdateHook) -> list[CacheUpdate]:
    """Call the hook in place of each layer's update; return the updates that it replaces."""
    updates: list[CacheUpdate] = [layer.impl.do_kv_cache_update for layer in layers]
    for index, layer in enumerate(layers):
        layer.impl.do_kv_cache_update = _passing_through(index, updates[index], hook)
    return updates


def _passing_through(index: int, update: CacheUpdate, hook: UpdateHook) -> CacheUpdate:
    def pass_through(
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        # vLLM names some of these arguments, by these names.
        hook(index, update, layer, key, value, kv_cache, slots)

    return pass_through
