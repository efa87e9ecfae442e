"""Load a model from an inspected folder into a `PagedEngine`.

Weights are read from safetensors files only: nothing is unpickled, and no code from a checkpoint is
run. Errors of transformers about a checkpoint become one line of ours.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import transformers as _transformers

from halfmoon_engine.attention.attention_probe import probe_attention
from halfmoon_engine.attention.kv_pool import DTYPE_NAMES, TORCH_DTYPES
from halfmoon_engine.attention.paged_attention import ATTENTION_NAME
from halfmoon_engine.checkpoints.architecture import check_architecture, max_context
from halfmoon_engine.checkpoints.compute_dtype import compute_dtype
from halfmoon_engine.checkpoints.fingerprint import fingerprint
from halfmoon_engine.checkpoints.hub_offline import hub_offline
from halfmoon_engine.checkpoints.inspected_files import folder_of_weights
from halfmoon_engine.checkpoints.meta_model import check_config_matches_files, check_loaded_weights
from halfmoon_engine.checkpoints.model_tokenizer import read_model_tokenizer
from halfmoon_engine.checkpoints.text_class import text_class, text_config_of
from halfmoon_engine.interface import Device
from halfmoon_engine.native.extension import NativeMode, native_extension
from halfmoon_engine.paged_engine import PagedEngine
from halfmoon_engine.runners.runner_choice import choose_runner, has_native_form
from halfmoon_engine.sampling.grammar_masks import GrammarMasks
from halfmoon_engine.stages.model_cut import (
    absent_parts,
    cut_model,
    model_layers,
    partial_class,
    stage_of,
)
from halfmoon_engine.stages.stage_model import StageModel
from halfmoon_engine.stages.stage_probe import check_cut
from halfmoon_engine.stages.unused_parts import leave_out_other_inputs
from halfmoon_models.errors import ModelError, UnsupportedModel, one_line
from halfmoon_models.folder_inspection import InspectedModel
from halfmoon_models.machine_cores import machine_cores
from halfmoon_models.model_kinds import unserved_inputs
from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.kv_layout import DType, KvLayout

log = logging.getLogger(__name__)
transformers: Any = _transformers

_MIB = 1 << 20
_FETCH_CONFIG = (
    "fetch config.json once more; where it is as its maker published it, transformers "
    f"{transformers.__version__} can't make the model, and another version may"
)


@hub_offline()
def load_torch_engine(
    path_or_hub_id: str,
    inspected: InspectedModel,
    *,
    block_size: int,
    dtype: DType | Literal["auto"],
    device: Device,
    threads: int | None,
    served_name: str | None,
    native: NativeMode = "auto",
    stage_index: int = 0,
    n_stages: int = 1,
) -> PagedEngine:
    """Load, check and probe a model; arguments and errors are those of `load.open_engine`."""
    check_block_size(block_size)
    # Torch's own number knows no quota; it does know OMP_NUM_THREADS.
    torch.set_num_threads(threads or min(torch.get_num_threads(), machine_cores()))
    folder, target = inspected.folder, _device(device)
    dtype = compute_dtype(
        inspected,
        dtype,
        on_cpu=target.type == "cpu",
        native=has_native_form(inspected.config["model_type"], native),
    )
    with _library_errors(f"{folder}/config.json is not one that can be used", _FETCH_CONFIG):
        config = text_config_of(_read_config(inspected))
        auto_class = text_class(config)
        check_architecture(config)
        stage = stage_of(config, stage_index, n_stages)
    made = f"{folder}: its config.json describes no model that can be made"
    with _library_errors(made, _FETCH_CONFIG):
        empty = check_config_matches_files(auto_class, config, inspected, n_stages)
        cut_model(empty, stage)
    model_class = partial_class(type(empty), leave_out_other_inputs, lambda m: cut_model(m, stage))
    with _library_errors(f"{folder} can't be loaded", "fetch the model once more"):
        model = _load(inspected, dtype, model_class, config)
        staged = StageModel(model.eval().requires_grad_(False).to(target), stage)
    kind = one_line(config.model_type, 60)
    unserved = unserved_inputs(inspected.config)
    alone = " on text alone" if unserved else ""
    run = f"a model of type {kind!r} can't be served: it can't be run{alone}"
    with _library_errors(run, "choose a decoder-only language model"):
        check_cut(staged)
        probed = probe_attention(staged)
        if stage.is_whole:
            stage = msgspec.structs.replace(stage, n_layers=probed.shape.n_layers)
    with _library_errors(
        f"{folder}: its tokenizer can't be used", "fetch tokenizer.json once more"
    ):
        tokenizer = read_model_tokenizer(folder, inspected.config)
        eos_token_ids = tuple(tokenizer.end_tokens if tokenizer else ()) or _eos_token_ids(model)
        grammars = (
            GrammarMasks.for_model(
                tokenizer.definition, model.get_output_embeddings().weight.shape[0], eos_token_ids
            )
            if tokenizer is not None and stage.is_last
            else None
        )
    n_vocab = _n_vocab(model) if stage.is_whole else int(_text_config(config).vocab_size)
    layout = KvLayout(
        model=fingerprint(folder),
        n_layers=stage.n_layers if stage.is_whole else model_layers(config),
        n_kv_heads=probed.shape.n_kv_heads,
        head_dim=probed.shape.head_dim,
        dtype=DTYPE_NAMES[model.dtype],
        block_size=block_size,
    )
    longest = max_context(config)
    _log_stage(staged, inspected)
    runner = choose_runner(
        staged,
        probed,
        layout,
        longest,
        lambda: StageModel(_load_for_attention(inspected, dtype, model_class, config), stage),
        native,
    )
    log.info("computing with %s", runner.description)
    if unserved:
        log.info("%s", unserved)
    return PagedEngine(
        runner,
        layout,
        name=served_name or _own_name(path_or_hub_id, folder),
        n_vocab=n_vocab,
        max_context=longest,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        native=native_extension(native),
        stage=stage,
    )


def _log_stage(staged: StageModel, inspected: InspectedModel) -> None:
    """Log which layers were loaded, and how much of the model's weights they are."""
    stage = staged.stage
    if stage.is_whole:
        return
    parameters = list(staged.model.parameters())
    n_bytes = sum(each.nbytes for each in parameters)
    log.info(
        "stage %d of %d: layers %d to %d of %d are loaded, %.1f MiB: %.0f%% of the model's numbers",
        stage.index,
        stage.n_stages,
        stage.first_layer,
        stage.first_layer + stage.n_layers - 1,
        model_layers(staged.model.config),
        n_bytes / _MIB,
        100 * sum(each.numel() for each in parameters) / inspected.weights.n_elements,
    )


@contextmanager
def _library_errors(what: str, way_out: str) -> Iterator[None]:
    """Turn a library's error about a checkpoint into an `UnsupportedModel` of one line.

    Log lines of transformers meanwhile, tables and texts of the checkpoint, are not shown.
    """
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    except (ModelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in a library of Rust is no Exception
        lines = [line for line in map(str.strip, str(error).splitlines()) if line]
        reason = one_line(" ".join(lines[:3]) or type(error).__name__, 300)
        if isinstance(error, ImportError):
            way_out = "install the package that its class in transformers asks for"
        raise UnsupportedModel(f"{what} ({type(error).__name__}: {reason}); {way_out}") from error
    finally:
        transformers.logging.set_verbosity(before)


def _read_config(inspected: InspectedModel) -> Any:
    kind = inspected.config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        if "auto_map" in inspected.config:
            raise UnsupportedModel(
                f"a model of type {one_line(kind, 60)!r} can't be served: it comes with code of "
                "its own (auto_map in config.json), which is never run, and transformers "
                f"{transformers.__version__} does not know the type; a newer one may"
            )
        raise UnsupportedModel(
            f"a model of type {one_line(kind, 60)!r} can't be served: transformers "
            f"{transformers.__version__} does not know the type; a newer one may"
        )
    if "auto_map" in inspected.config:
        log.info("the code that auto_map names is not run: transformers has the type %r", kind)
    # Of what was inspected: the folder may name another file, or have changed meanwhile.
    config = transformers.CONFIG_MAPPING[kind].from_dict(_without_code(inspected.config))
    # Ours replaces it in any case, and what trained the model may not be installed.
    config._attn_implementation = "eager"
    # Some of those that may be asked for are fetched from the hub.
    config._experts_implementation = None
    return config


def _without_code(part: Any) -> Any:
    """Copy a configuration without the names of its author's code, which nested parts have too."""
    if isinstance(part, Mapping):
        return {key: _without_code(value) for key, value in part.items() if key != "auto_map"}
    return [_without_code(value) for value in part] if isinstance(part, list) else part


def _load(
    inspected: InspectedModel, dtype: DType | Literal["auto"], model_class: Any, config: Any
) -> Any:
    with folder_of_weights(inspected) as folder:
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype == "auto" else TORCH_DTYPES[dtype],
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, in one line
            output_loading_info=True,
        )
    check_loaded_weights(model, info, inspected, absent_parts(model))
    if model.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(
            f"{inspected.folder} holds weights of {model.dtype}; ask for one of "
            f"{', '.join(TORCH_DTYPES)}"
        )
    return model


def _load_for_attention(
    inspected: InspectedModel, dtype: DType | Literal["auto"], model_class: Any, config: Any
) -> Any:
    """Load a probed model once more, for the CPU."""
    model = _load(inspected, dtype, model_class, config).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


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
        # The nested configuration of some multimodal models has no end.
        ids = getattr(_text_config(model.config), "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(token) for token in ids)


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _n_vocab(model: Any) -> int:
    """Return the number of tokens with both an embedding and a logit."""
    n_embedded = int(model.get_input_embeddings().num_embeddings)
    head = model.get_output_embeddings()
    return n_embedded if head is None else min(n_embedded, int(head.weight.shape[0]))
