"""Choose what computes a loaded model: whole layers natively, attention natively, or torch."""

import logging
from collections.abc import Callable

import torch

from halfmoon_engine.attention.attention_probe import ProbedModel
from halfmoon_engine.native.decoder_reader import FAMILIES, NotNative, read_decoder
from halfmoon_engine.native.extension import NativeMode, native_extension
from halfmoon_engine.native.packed_decoder import pack_decoder
from halfmoon_engine.runners.model_runner import ModelRunner
from halfmoon_engine.runners.native_runner import NativeRunner
from halfmoon_engine.runners.transformers_runner import TransformersRunner
from halfmoon_engine.stages.stage_model import StageModel
from halfmoon_protocol.kv_layout import KvLayout

log = logging.getLogger(__name__)


def has_native_form(kind: str, mode: NativeMode) -> bool:
    """Return whether the extension is there, and computes whole layers of a model type.

    Raises:
        NativeUnavailable: the extension is asked for and not installed.
    """
    return native_extension(mode) is not None and kind in FAMILIES


def choose_runner(
    staged: StageModel,
    probed: ProbedModel,
    layout: KvLayout,
    longest: int,
    reload: Callable[[], StageModel],
    mode: NativeMode,
) -> ModelRunner:
    """Return the fastest runner that computes this model right.

    Args:
        staged: a model with our attention, or its stage; a native runner takes its weights.
        probed: what the model's probe gave.
        layout: of the pool.
        longest: tokens of the longest sequence.
        reload: loads the model once more, when a native runner turns out wrong.
        mode: whether the extension may be used.

    Raises:
        NativeUnavailable: the extension is asked for and not installed.
    """
    model = staged.model
    native = native_extension(mode) if model.device.type == "cpu" else None
    if native is None:
        return TransformersRunner(staged, layout)
    native.set_threads(torch.get_num_threads())
    try:
        if longest < max(map(len, probed.prompts)):
            raise NotNative(f"a context of {longest} tokens is too short to compare them")
        parts = read_decoder(staged, probed.seen)
    except NotNative as reason:
        log.info("layers are computed by torch: %s", reason)
        return TransformersRunner(staged, layout, native=native)
    dtype = model.dtype
    try:
        runner = NativeRunner(native, pack_decoder(native, parts, longest), layout)
        runner.check(probed, dtype)
    except NotNative as reason:
        log.warning("layers are computed by torch: %s", reason)
        del parts, model, staged
        return TransformersRunner(reload(), layout, native=native)
    return runner
