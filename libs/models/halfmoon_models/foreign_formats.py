"""Refuse folders without a model in transformers' safetensors format.

The names of the files decide; only an adapter's configuration is read.
"""

from pathlib import Path

from halfmoon_models.bounded_files import MIB, read_json_object
from halfmoon_models.errors import ModelError, ModelNotFound, UnsupportedModel, one_line

ADAPTER_FILE = "adapter_config.json"
_CONVERT = (
    "convert it where you trust it, with transformers' from_pretrained and save_pretrained, which "
    "writes safetensors"
)
#: Endings of weight files that are not safetensors, with their format and the way out.
_ENDINGS = (
    (".gguf", "GGUF weights (llama.cpp)", "serve the model that they were converted from"),
    (".ggml", "GGML weights (llama.cpp)", "serve the model that they were converted from"),
    (".bin", "pickled weights (PyTorch)", _CONVERT),
    (".pt", "pickled weights (PyTorch)", _CONVERT),
    (".pth", "pickled weights (PyTorch)", _CONVERT),
    (".ckpt", "pickled weights (PyTorch)", _CONVERT),
    (".pkl", "pickled objects (Python)", _CONVERT),
    (".h5", "TensorFlow weights", _CONVERT),
    (".msgpack", "Flax weights", _CONVERT),
    (".onnx", "an ONNX graph", "serve the model that it was exported from"),
    (".tflite", "a TensorFlow Lite graph", "serve the model that it was exported from"),
    (".npz", "NumPy or MLX weights", "serve the model that they were converted from"),
    (".nemo", "a NeMo archive", "convert it with NeMo's own scripts to transformers' format"),
)
_SAFETENSORS_ONLY = "weights are read from safetensors files only, and nothing is unpickled"


def check_is_folder(path: Path) -> None:
    """Refuse a path that is no folder.

    Raises:
        UnsupportedModel: a file of a known kind of weights.
        ModelNotFound: another file, or nothing.
    """
    if path.is_dir():
        return
    for ending, what, way_out in _ENDINGS:
        if path.name.lower().endswith(ending) and path.exists():
            raise UnsupportedModel(f"{path} holds {what}, not served: {way_out}")
    if path.is_file():
        raise ModelNotFound(
            f"{path} is not a folder but a file; name the folder that has config.json and "
            "model.safetensors"
        )
    raise ModelNotFound(f"{path} is not a folder: nothing is there; name a model's folder")


def check_file_names(folder: Path, names: frozenset[str]) -> None:
    """Refuse a folder whose file names show another kind of content.

    Raises:
        UnsupportedModel: naming what it is, and the way out.
        ModelNotFound: no configuration, or no weights of any kind.
    """
    if ADAPTER_FILE in names or "adapter_model.safetensors" in names:
        raise _adapter(folder, names)
    if "model_index.json" in names:
        raise UnsupportedModel(
            f"{folder} holds a diffusers pipeline (model_index.json), which makes images: name a "
            "language model"
        )
    if "modules.json" in names or "config_sentence_transformers.json" in names:
        found = "modules.json" if "modules.json" in names else "config_sentence_transformers.json"
        raise UnsupportedModel(
            f"{folder} holds a sentence-transformers model ({found}), which embeds texts and "
            "writes none: name a language model"
        )
    foreign = _foreign(names)
    if "config.json" not in names:
        raise _without_config(folder, names, foreign)
    if foreign is not None and not any(name.endswith(".safetensors") for name in names):
        name, what, way_out = foreign
        raise UnsupportedModel(f"{folder} holds {what} ({name}); {_SAFETENSORS_ONLY}: {way_out}")


def _without_config(
    folder: Path, names: frozenset[str], foreign: tuple[str, str, str] | None
) -> ModelError:
    if foreign is not None:
        name, what, way_out = foreign
        return UnsupportedModel(f"{folder} holds {what} ({name}), not served: {way_out}")
    if "params.json" in names:
        return UnsupportedModel(
            f"{folder} holds weights in their author's own format (params.json), not "
            "transformers': fetch the model's transformers version, which has a config.json"
        )
    if "tokenizer.json" in names and not any(n.endswith(".safetensors") for n in names):
        return ModelNotFound(f"{folder} has no config.json, only a tokenizer: not a model's folder")
    what = "is empty" if not names else "has no config.json"
    return ModelNotFound(
        f"{folder} {what}: not a model's folder; name one with config.json and model.safetensors"
    )


def _adapter(folder: Path, names: frozenset[str]) -> ModelError:
    base = ""
    if ADAPTER_FILE in names:
        try:
            named = read_json_object(folder / ADAPTER_FILE, MIB).get("base_model_name_or_path")
            base = one_line(named, 120) if isinstance(named, str) and named else ""
        except ModelError:  # what it is shows by its name already
            pass
    of = f"its base model, {base!r}" if base else "its base model"
    beside = " beside a model" if "config.json" in names else ""
    return UnsupportedModel(
        f"{folder} holds an adapter{beside} (LoRA, {ADAPTER_FILE}), which is not served by itself: "
        f"serve {of}, or merge the two with peft's merge_and_unload and save the result"
    )


def _foreign(names: frozenset[str]) -> tuple[str, str, str] | None:
    """Return the first file of a foreign format, its format, and the way out."""
    ordered = sorted(names)
    for ending, what, way_out in _ENDINGS:
        for name in ordered:
            # Training leaves its arguments and states beside any kind of weights.
            if name.lower().endswith(ending) and not name.startswith(
                ("training_args", "optimizer", "scheduler", "rng_state")
            ):
                return name, what, way_out
    return None
