"""Choose the precision of weights and KV where the user leaves it to the engine.

In pure torch, half precision on a processor without its instructions takes longer than float32:
1.3 times with AVX-512, 4 times with AVX2 (linear layers of a prefill, one thread). Float32 takes
twice the memory, for weights and for each KV block.

All workers of a cluster share one KV layout, and the precision is part of it. So the choice depends
on the machine and the checkpoint only, not on what else runs at the moment.
"""

import logging
from dataclasses import dataclass
from typing import Literal

from halfmoon_engine.processor_features import computes_natively, processor_features
from halfmoon_models.folder_inspection import InspectedModel
from halfmoon_models.machine_memory import machine_memory_bytes
from halfmoon_protocol.kv_layout import DType

log = logging.getLogger(__name__)

#: Most of the machine's memory that float32 weights may take: a prefill and a decode worker may
#: share it, each with weights, KV pages, and the pages of the files that it reads.
FLOAT32_SHARE = 0.25
_GIB = 1 << 30
_BY_SAFETENSORS: dict[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class DTypeChoice:
    """A precision, and what the user should know of the choice."""

    dtype: DType
    #: Empty when there was nothing to choose.
    reason: str = ""


def choose_dtype(
    saved: DType,
    *,
    features: frozenset[str] | None,
    native: bool,
    n_elements: int,
    memory_bytes: int | None,
) -> DTypeChoice:
    """Choose the precision to compute in.

    Args:
        saved: the checkpoint's precision.
        features: of the processor, as /proc/cpuinfo names them; None if unknown.
        native: whether the native extension computes all layers. It reads weights in half
            precision and sums in float32, without a loss of speed.
        n_elements: of all weights.
        memory_bytes: the machine's memory or this process's limit; None if unknown.
    """
    if native or features is None or computes_natively(saved, features):
        return DTypeChoice(saved)
    float32_bytes = 4 * n_elements
    lacks = f"this processor has no {saved} instructions"
    if memory_bytes is not None and float32_bytes > FLOAT32_SHARE * memory_bytes:
        return DTypeChoice(
            saved,
            f"computing in {saved}, which is slow here: {lacks}, and float32 weights would take "
            f"{float32_bytes / _GIB:.1f} of {memory_bytes / _GIB:.1f} GiB of memory, more than "
            f"{FLOAT32_SHARE:.0%}; if they fit nevertheless, set --dtype float32 on all workers",
        )
    return DTypeChoice(
        "float32",
        f"computing in float32, with twice the memory: {lacks}; to change this, or where "
        f"processors of a cluster differ, set --dtype {saved} or float32 on all workers",
    )


def compute_dtype(
    inspected: InspectedModel, dtype: DType | Literal["auto"], *, on_cpu: bool, native: bool
) -> DType | Literal["auto"]:
    """Return the precision to load a model in, and log a choice that is not the checkpoint's.

    Args:
        inspected: the model's folder.
        dtype: what the user asked for; anything but "auto" is returned.
        on_cpu: whether the CPU computes; other devices keep the checkpoint's precision.
        native: whether the native extension computes all layers.

    Returns:
        "auto" when the checkpoint does not say in one word what it was saved in.
    """
    saved = saved_dtype(inspected)
    if dtype != "auto" or not on_cpu or saved is None:
        return dtype
    choice = choose_dtype(
        saved,
        features=processor_features(),
        native=native,
        n_elements=inspected.weights.n_elements,
        memory_bytes=machine_memory_bytes(),
    )
    if choice.reason:
        log.warning("%s", choice.reason)
    return choice.dtype


def saved_dtype(inspected: InspectedModel) -> DType | None:
    """Return the precision that a configuration names, or that all its tensors have."""
    config = inspected.config
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    for dtype in _BY_SAFETENSORS.values():
        if named == dtype:
            return dtype
    found = {entry.dtype for entry in inspected.weights.tensors.values()}
    return _BY_SAFETENSORS.get(found.pop()) if not named and len(found) == 1 else None
