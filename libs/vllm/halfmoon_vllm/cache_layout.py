"""Find the pool's layout of a server's blocks, or why the server can't share the pool."""

from dataclasses import dataclass
from typing import Any

from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.kv_layout import KvLayout
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
    if len(groups) != 1:
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve {len(groups)} groups of differing layers: start vLLM "
            "with --disable-hybrid-kv-cache-manager if the model allows"
        )
    spec = groups[0].kv_cache_spec
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
    return ""


def _dtype_name(spec: Any) -> Any:
    from halfmoon_engine.attention.kv_pool import DTYPE_NAMES

    kind = type(spec).__name__
    if kind != "FullAttentionSpec" or spec.head_size != spec.head_size_v:
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve caches of {kind} with heads of {spec.head_size} and "
            f"{getattr(spec, 'head_size_v', '?')}: it shares full attention with plain heads"
        )
    name = DTYPE_NAMES.get(spec.dtype)
    if name is None:
        known = ", ".join(DTYPE_NAMES.values())
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve a KV cache of {spec.dtype}: set --kv-cache-dtype to "
            f"one of {known}, or auto"
        )
    return name


def _identity(model_config: Any) -> str:
    from halfmoon_engine.checkpoints.model_folder import open_model_folder
    from halfmoon_models.model_location import local_folder
    from halfmoon_vllm.model_identity import model_identity

    model = model_config.model
    return model_identity(local_folder(model) or open_model_folder(model).folder, model_config)
