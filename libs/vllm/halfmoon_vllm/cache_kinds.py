"""Recognise the kind of a server's caches by vLLM's specs, and refuse all but plain attention.

A spec of another kind has other fields, or tuples in the place of numbers. So its kind is looked at
first, by the name of its class.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from halfmoon_vllm.connector_settings import ConnectorRefused

_PLAIN = "FullAttentionSpec"
#: What a spec of vLLM describes, by the name of its class.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        _PLAIN: "full attention",
        "MambaSpec": "a recurrent state (Mamba, linear attention)",
        "SlidingWindowSpec": "attention in a sliding window",
        "ChunkedLocalAttentionSpec": "attention in chunks",
        "MLAAttentionSpec": "multi-head latent attention",
        "SlidingWindowMLASpec": "multi-head latent attention in a sliding window",
        "CrossAttentionSpec": "attention to an encoder",
        "EncoderOnlyAttentionSpec": "an encoder's attention, which keeps nothing",
        "SinkFullAttentionSpec": "attention with sinks in the cache",
    }
)
#: Most kinds that a refusal lists.
_LISTED = 4


def find_plain_spec(groups: Sequence[Any]) -> Any:
    """Return the spec that all layers of a server's cache have.

    Args:
        groups: vLLM's KVCacheGroupSpec of each group of layers.

    Raises:
        ConnectorRefused: there is none, or the caches are of another kind; it is named.
    """
    if not groups:
        raise ConnectorRefused(
            "HalfmoonConnector can't serve a model whose layers keep no keys and values: start "
            "vLLM without the connector"
        )
    specs = [spec for group in groups for spec in _specs_of(group.kv_cache_spec)]
    odd = sorted({type(spec).__name__ for spec in specs} - {_PLAIN})
    if odd:
        listed = ", ".join(f"{_KINDS.get(kind, 'another kind')} ({kind})" for kind in odd[:_LISTED])
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve caches of {listed}: it shares full attention with "
            f"plain heads{_way_out(odd)}"
        )
    shapes = sorted({_shape(spec) for spec in specs})
    if len(shapes) > 1:
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve layers of {len(shapes)} shapes of KV "
            f"({'; '.join(shapes[:_LISTED])}): a block of the pool has one; start vLLM without the "
            "connector"
        )
    if len(groups) > 1:
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve {len(groups)} groups of differing layers: start vLLM "
            "with --disable-hybrid-kv-cache-manager if the model allows"
        )
    _check_heads(specs[0])
    return specs[0]


def _specs_of(spec: Any) -> list[Any]:
    """Return the specs of a group's layers: one for all, or one for each."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return list(by_layer.values()) if isinstance(by_layer, Mapping) and by_layer else [spec]


def _shape(spec: Any) -> str:
    heads, size = getattr(spec, "num_kv_heads", "?"), getattr(spec, "head_size", "?")
    return f"{heads} heads of {size}, blocks of {getattr(spec, 'block_size', '?')}"


def _check_heads(spec: Any) -> None:
    keys, values = getattr(spec, "head_size", None), getattr(spec, "head_size_v", None)
    if keys != values:
        raise ConnectorRefused(
            f"HalfmoonConnector can't serve keys with heads of {keys} and values with heads of "
            f"{values}: it shares full attention with plain heads"
        )
    for name in ("num_kv_heads", "head_size", "block_size"):
        value = getattr(spec, name, None)
        if type(value) is not int or value < 1:
            raise ConnectorRefused(
                f"HalfmoonConnector can't serve a cache whose {name} is {value!r:.60}: it is a "
                "whole number where layers have plain heads; start vLLM without the connector"
            )


def _way_out(odd: Sequence[str]) -> str:
    if set(odd) <= {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}:
        return "; start vLLM with --disable-hybrid-kv-cache-manager if the model allows"
    return "; start vLLM without the connector"
