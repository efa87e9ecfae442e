"""Check the numbers of a configuration, before anything is allocated by them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from halfmoon_models.config_parts import text_parts
from halfmoon_models.errors import BrokenCheckpoint, one_line

#: Sizes in a configuration, under the names of all kinds of models, and their largest values: far
#: above any existing model, far below a machine's memory.
_LIMITS = {
    "num_hidden_layers": 10_000,
    "n_layer": 10_000,
    "n_layers": 10_000,
    "num_layers": 10_000,
    "hidden_size": 1 << 18,
    "n_embd": 1 << 18,
    "d_model": 1 << 18,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "n_inner": 1 << 22,
    "num_attention_heads": 1 << 14,
    "n_head": 1 << 14,
    "n_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "n_positions": 1 << 31,
    "num_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
}
#: Fields that are zero where a kind of layers is left out.
_MAY_BE_ZERO = frozenset(
    {
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "num_experts_per_tok",
    }
)
#: Parts of the names of further fields that count modules.
_COUNTS = ("layer", "depth", "blocks", "expert", "heads", "stages")
_MAX_COUNT = 1 << 22
_MAX_INTEGER = 1 << 53
_MAX_LIST = 1_000_000
_DTYPES = frozenset({"float32", "float16", "bfloat16", "auto"})
#: Lists of limits that are open on one side.
_MAY_BE_INFINITE = frozenset({"time_step_limit"})


def check_config_bounds(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with numbers that can't be meant.

    Raises:
        BrokenCheckpoint: naming the field, the value and the limit.
    """
    for path, value in _leaves(config, ""):
        _check_any(path, value)
    for prefix, part in text_parts(config):
        for field, most in _LIMITS.items():
            if field in part:
                _check_size(prefix + field, part[field], field, most)
        _check_heads(prefix, part)
        for field in ("dtype", "torch_dtype"):
            dtype = part.get(field)
            if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
                raise BrokenCheckpoint(
                    f"config.json: {prefix}{field} is {one_line(dtype, 60)!r}, served are "
                    "float32, bfloat16 and float16: save the model once more in one of these"
                )


def _check_size(path: str, value: Any, field: str, most: int) -> None:
    if value is None:  # it follows from other fields, or transformers says that it can't be
        return
    least = 0 if field in _MAY_BE_ZERO else 1
    per_layer = value if isinstance(value, list) else [value]
    for one in per_layer:
        if type(one) is not int or not least <= one <= most:
            raise _refusal(path, value, f"a whole number from {least} to {most} is wanted")


def _check_heads(prefix: str, part: Mapping[str, Any]) -> None:
    heads = part.get("num_attention_heads")
    if type(heads) is not int:
        return
    hidden, shared = part.get("hidden_size"), part.get("num_key_value_heads")
    if part.get("head_dim") is None and type(hidden) is int and hidden % heads:
        raise _refusal(
            f"{prefix}hidden_size", hidden, f"a multiple of num_attention_heads, {heads}, is wanted"
        )
    if type(shared) is int and heads % shared:
        raise _refusal(
            f"{prefix}num_key_value_heads",
            shared,
            f"a divisor of num_attention_heads, {heads}, is wanted",
        )


def _check_any(path: str, value: Any) -> None:
    last = path.rpartition(".")[2]
    if isinstance(value, float):
        if not math.isfinite(value) and last not in _MAY_BE_INFINITE:
            raise _refusal(path, value, "a finite number is wanted")
    elif isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _MAX_INTEGER:
            raise _refusal(path, value, f"at most {_MAX_INTEGER} is allowed")
        if value > _MAX_COUNT and any(word in last for word in _COUNTS):
            raise _refusal(path, value, f"at most {_MAX_COUNT} is allowed")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all values that are no objects or lists, with their paths."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        if len(value) > _MAX_LIST:
            raise _refusal(path, f"a list of {len(value)}", f"at most {_MAX_LIST} are allowed")
        for part in value:
            yield from _leaves(part, path)
    else:
        yield path, value


def _refusal(path: str, value: Any, wanted: str) -> BrokenCheckpoint:
    shown = one_line(value if not isinstance(value, int) else _digits(value), 60)
    return BrokenCheckpoint(
        f"config.json: {one_line(path, 80)} is {shown}, {wanted}; fetch the model once more"
    )


def _digits(value: int) -> str:
    return str(value) if abs(value) < 10**30 else f"{'-' if value < 0 else ''}10^30 or more"
