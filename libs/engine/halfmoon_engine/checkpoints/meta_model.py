"""Make a model without weights and compare it with its files, before memory is taken.

A configuration may describe more than its files hold, by mistake or as an attack. Modules are
counted while they are made, and parameters before any of them has memory.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from halfmoon_engine.stages.unused_parts import leave_out_other_inputs
from halfmoon_models.errors import BrokenCheckpoint, UnsupportedModel
from halfmoon_models.folder_inspection import InspectedModel, check_fits_memory

#: Bounds on a model's modules: for each tensor in its files, and in addition.
_MODULES_PER_TENSOR = 16
_MODULES = 2_000


def check_config_matches_files(
    model_class: Any, config: Any, inspected: InspectedModel, n_stages: int = 1
) -> Any:
    """Refuse a configuration that describes another model than its files hold.

    Args:
        model_class: transformers' auto class.
        config: of transformers.
        inspected: the folder.
        n_stages: parts of the weights, of which this machine loads one.

    Returns:
        The model, without memory and without parts that text does not use.

    Raises:
        BrokenCheckpoint: it describes more numbers than the files have.
        UnsupportedModel: buffers beside the weights take more than the machine's memory.
    """
    tensors = inspected.weights.tensors
    limit = _MODULES + _MODULES_PER_TENSOR * len(tensors)
    with _at_most(limit, len(tensors)), torch.device("meta"):
        model = model_class.from_config(config, trust_remote_code=False)
        leave_out_other_inputs(model)
    described = sum(parameter.numel() for parameter in model.parameters())
    there = inspected.weights.n_elements
    if described > there:
        raise BrokenCheckpoint(
            f"config.json describes a model of {described} parameters, the files hold {there}; "
            "fetch the model once more, all of its files"
        )
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    n_bytes = inspected.weights.n_bytes // n_stages + buffers
    check_fits_memory(inspected.folder, 0, n_bytes, {}, "auto")
    return model


@contextmanager
def _at_most(limit: int, n_tensors: int) -> Iterator[None]:
    """Count the modules that this thread makes, and raise at too many."""
    thread, count = threading.get_ident(), 0

    def on_module(module: torch.nn.Module, name: str, child: Any) -> None:
        nonlocal count
        if threading.get_ident() != thread:
            return
        count += 1
        if count > limit:
            raise BrokenCheckpoint(
                f"config.json describes a model of more than {limit} parts, the files hold only "
                f"{n_tensors} tensors; fetch the model once more, all of its files"
            )

    handle = register_module_module_registration_hook(on_module)
    try:
        yield
    finally:
        handle.remove()


def check_loaded_weights(
    model: Any, info: dict[str, Any], inspected: InspectedModel, absent: Sequence[str] = ()
) -> None:
    """Refuse a loaded model whose weights do not all come from its files, each in its place.

    Args:
        model: of transformers.
        info: what `from_pretrained` says with ``output_loading_info``.
        inspected: the folder.
        absent: parts that other stages load.

    Raises:
        BrokenCheckpoint: tensors are missing, of another shape, or belong to parts that the
            configuration leaves out.
    """
    folder = inspected.folder
    if mismatched := sorted(map(str, info.get("mismatched_keys") or ())):
        raise BrokenCheckpoint(
            f"{folder}: config.json asks for other shapes than the files have, first "
            f"{mismatched[0]} ({len(mismatched)} in all); fetch the model once more"
        )
    if missing := sorted(info.get("missing_keys") or ()):
        raise BrokenCheckpoint(
            f"{folder} lacks tensor {missing[0]!r} ({len(missing)} in all) that config.json asks "
            "for; fetch the model once more, all of its files"
        )
    known = {_any_layer(name) for name, _ in model.named_modules() if name}
    # A checkpoint's names may begin at the model without its head.
    base = f"{model.base_model_prefix}."
    elsewhere = tuple(f"{part.removeprefix(base)}." for part in absent)
    unused = [
        name
        for name in sorted(info.get("unexpected_keys") or ())
        if _any_layer(name.rpartition(".")[0]) in known
        and not name.removeprefix(base).startswith(elsewhere)
    ]
    if unused:
        raise BrokenCheckpoint(
            f"{folder} holds tensor {unused[0]!r} ({len(unused)} in all) that config.json leaves "
            "unused: it describes another model; fetch both once more"
        )
    if errors := info.get("error_msgs"):
        raise UnsupportedModel(f"{folder} can't be loaded: {errors}")


def _any_layer(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
