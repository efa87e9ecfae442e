"""Find the pool's layout of a server's blocks, or why the server can't share the pool."""

from dataclasses import dataclass
from typing import Any

from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_vllm.cache_kinds import find_plain_spec
from halfmoon_vllm.connector_settings import ConnectorRefused


@dataclass(frozen=True)
class CacheLayout:
    """Describe what a server's cache holds, and the pool's blocks."""

    layout: KvLayout
    #: All attention layers, in any order.
    layer_names: tuple[str, ...]
    #: Tokens of a block of vLLM's cache: a multiple of the pool's.
    vllm_block_size: int

    @property
    def per_vllm_block(self) -> int:
        """Blocks of the pool in one block of vLLM's cache."""
        return self.vllm_block_size // self.layout.block_size


def find_cache_layout(vllm_config: Any, kv_cache_config: Any, block_size: int) -> CacheLayout:
    """Return the layout of a server's blocks.

    Args:
        vllm_config: of the server.
        kv_cache_config: its cache, by groups of layers.
        block_size: tokens of the pool's blocks; 0: as many as vLLM's.

    Raises:
        ConnectorRefused: the text names what the connector can't do.
        ModelError: the model's folder can't be read.
    """
    if reason := _unsupported(vllm_config):
        raise ConnectorRefused(f"HalfmoonConnector can't serve {reason}")
    groups = kv_cache_config.kv_cache_groups
    spec = find_plain_spec(groups)
    dtype = _dtype_name(spec)
    size = block_size or spec.block_size
    try:
        check_block_size(size)
    except ProtocolError as error:
        raise ConnectorRefused(
            f"{error}: set block_size in kv_connector_extra_config, or --block-size of vLLM"
        ) from None
    if spec.block_size % size:
        raise ConnectorRefused(
            f"vLLM's blocks have {spec.block_size} tokens, the pool's {size}: the first must be "
            "a multiple of the second; set --block-size of vLLM, or block_size of the connector"
        )
    names = tuple(groups[0].layer_names)
    layout = KvLayout(
        model=_identity(vllm_config.model_config),
        n_layers=len(names),
        n_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        block_size=size,
    )
    return CacheLayout(layout, names, spec.block_size)


def _unsupported(vllm_config: Any) -> str:
    """Name a feature whose KV the pool can't share; empty if there is none."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (ranks := getattr(parallel, name, 1)) > 1:
            return f"{name} {ranks}: it is 1"
    if vllm_config.speculative_config is not None:
        return "speculative decoding"
    if model.hf_overrides:
        return "hf_overrides: they change the KV and not the model's fingerprint"
    if model.use_mla:
        return "multi-head latent attention"
    text = getattr(model, "hf_text_config", None)
    if shared := getattr(text, "num_kv_shared_layers", 0):
        return f"layers that use another layer's keys and values (num_kv_shared_layers {shared})"
    return ""


def _dtype_name(spec: Any) -> Any:
    from halfmoon_engine.attention.kv_pool import DTYPE_NAMES

    dtype = getattr(spec, "dtype", None)
    name = next((name for known, name in DTYPE_NAMES.items() if known == dtype), None)
    if name is None:
        known = ", ".join(DTYPE_NAMES.values())
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve a KV cache of {dtype}: set --kv-cache-dtype to "
            f"one of {known}, or auto"
        )
    return name


def _identity(model_config: Any) -> str:
    from halfmoon_engine.checkpoints.model_folder import open_model_folder
    from halfmoon_models.model_location import local_folder
    from halfmoon_vllm.model_identity import model_identity

    model = model_config.model
    return model_identity(local_folder(model) or open_model_folder(model).folder, model_config)
