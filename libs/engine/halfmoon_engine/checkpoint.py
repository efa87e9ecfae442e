"""Loading a real model: from a folder or a hub id to a `TorchEngine`.

A local folder never touches the network; a hub id is fetched into the hub's cache first and
is then a folder like any other. Weights are read from safetensors files only: nothing is
unpickled, and no code from a checkpoint is run.
"""

from pathlib import Path
from typing import Any, Literal

import torch
import transformers as _transformers
from huggingface_hub import snapshot_download

from halfmoon_engine.architecture import check_config, max_context, probe
from halfmoon_engine.errors import EngineError, ModelNotFound, UnsupportedModel
from halfmoon_engine.fingerprint import fingerprint, weight_files
from halfmoon_engine.grammar import Grammars
from halfmoon_engine.load import Device
from halfmoon_engine.pool import TORCH_DTYPES
from halfmoon_engine.torch_engine import DTYPE_NAMES, TorchEngine
from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.layout import DType

transformers: Any = _transformers
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]


def load_torch_engine(
    path_or_hub_id: str,
    *,
    block_size: int,
    dtype: DType | Literal["auto"],
    device: Device,
    threads: int | None,
    served_name: str | None,
) -> TorchEngine:
    """Load, check and probe a model; arguments and errors are those of `load.open_engine`."""
    check_block_size(block_size)
    if threads:
        torch.set_num_threads(threads)
    folder = find_folder(path_or_hub_id)
    config = _read_config(folder)
    check_config(config)
    weight_files(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="auto" if dtype == "auto" else TORCH_DTYPES[dtype],
        attn_implementation="eager",
        local_files_only=True,
        use_safetensors=True,
    )
    if model.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(
            f"{folder} holds weights of {model.dtype}; ask for one of {', '.join(TORCH_DTYPES)}"
        )
    model = model.eval().requires_grad_(False).to(_device(device))
    eos_token_ids = _eos_token_ids(model)
    return TorchEngine(
        model,
        probe(model),
        name=served_name or _own_name(path_or_hub_id, folder),
        fingerprint=fingerprint(folder),
        block_size=block_size,
        max_context=max_context(config),
        eos_token_ids=eos_token_ids,
        grammars=Grammars.of_model(
            folder, model.get_output_embeddings().weight.shape[0], eos_token_ids
        ),
    )


def find_folder(path_or_hub_id: str) -> Path:
    """The folder that a path or hub id names; a hub id's files are fetched if need be.

    Raises:
        ModelNotFound: neither a folder nor an id that the hub knows.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json: not a model's folder")
        return path
    if path.is_absolute() or path_or_hub_id.startswith((".", "~")) or path.exists():
        raise ModelNotFound(f"{path} is not a folder")
    try:
        return Path(snapshot_download(path_or_hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise ModelNotFound(
            f"{path_or_hub_id!r} is not a folder here, and as a hub id it can't be fetched: {error}"
        ) from error


def _read_config(folder: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except EngineError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{folder}/config.json is not one we can use: {error}") from error


def _device(device: Device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _own_name(path_or_hub_id: str, folder: Path) -> str:
    is_path = Path(path_or_hub_id).expanduser() == folder
    return folder.resolve().name if is_path else path_or_hub_id


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config(decoder=True).eos_token_id
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(token) for token in ids)
