"""Weights and configuration that don't belong together are refused, not filled in or cut."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from halfmoon_engine.checkpoints.hub_offline import hub_offline
from halfmoon_engine.checkpoints.torch_loader import _read_config
from halfmoon_engine.load import open_engine
from halfmoon_models import folder_inspection as folder_module
from halfmoon_models.errors import BrokenCheckpoint, ModelError, UnsupportedModel
from halfmoon_models.folder_inspection import inspect_folder
from halfmoon_testing.models.llama_folders import (
    LLAMA_CONFIG,
    llama_tensors,
    make_llama,
    safetensors_bytes,
    write_files,
)
from halfmoon_testing.models.tiny_models import ARCHITECTURES, make_tiny_model

Tensors = dict[str, tuple[str, list[int]]]


def refusal(folder: Path, kind: type[ModelError] = BrokenCheckpoint) -> str:
    with pytest.raises(kind) as caught:
        open_engine(str(folder), block_size=16, device="cpu", threads=1)
    return str(caught.value)


def with_tensors(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    return write_files(make_llama(folder, **changes), model__safetensors=safetensors_bytes(tensors))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["model.norm.weight"]
    tensors["model.other.weight"] = ("F32", [16])
    assert "lacks tensor 'model.norm.weight'" in refusal(with_tensors(tmp_path, tensors))


def test_a_head_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["lm_head.weight"]
    folder = with_tensors(tmp_path, tensors)
    assert "describes a model of 2864 parameters, the files hold 2352" in refusal(folder)
    write_files(folder, config__json={**LLAMA_CONFIG, "tie_word_embeddings": True})
    assert open_engine(str(folder), block_size=16, device="cpu").max_context == 64


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.0.mlp.up_proj.weight", [8, 32]), ("model.norm.weight", [32])]
)
def test_a_tensor_of_another_shape_is_named(name: str, shape: list[int], tmp_path: Path) -> None:
    tensors = {**llama_tensors(), name: ("F32", shape)}
    assert name in refusal(with_tensors(tmp_path, tensors))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm",
    ],
)
def test_a_tensor_that_the_config_leaves_unused_is_named(name: str, tmp_path: Path) -> None:
    tensors = {**llama_tensors(), name: ("F32", [16])}
    line = refusal(with_tensors(tmp_path, tensors))
    assert name in line and "leaves unused" in line


def test_parts_that_the_model_does_not_have_may_lie_beside_it(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "vision_tower.patch.weight": ("F32", [16])}
    folder = with_tensors(tmp_path, tensors)
    assert open_engine(str(folder), block_size=16, device="cpu").max_context == 64


def test_a_config_of_more_parts_than_the_files_can_have_ends_early(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), **{f"extra.{i}": ("F32", [1]) for i in range(300)}}
    line = refusal(with_tensors(tmp_path, tensors, num_hidden_layers=300))
    assert "parameters, the files hold" in line
    # Each expert is a module here, and the count of experts is no count of tensors.
    line = refusal(
        make_llama(
            tmp_path / "experts", model_type="ernie4_5_moe", moe_num_experts=60_000, moe_k=1,
            moe_intermediate_size=1, moe_layer_start_index=0, architectures=None,
        )
    )  # fmt: skip
    assert "describes a model of" in line


def test_a_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    line = refusal(make_llama(tmp_path, model_type="unheard_of"), UnsupportedModel)
    assert "'unheard_of'" in line and "does not know the type" in line


def test_a_tokenizer_that_its_library_refuses_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_files(make_llama(tmp_path), tokenizer__json={"model": {"type": "Nothing"}})
    assert "the tokenizer of" in refusal(folder, BrokenCheckpoint)


def test_a_stage_needs_memory_for_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = llama_tensors()
    for name in [name for name in tensors if name.startswith("model.layers.0.")]:
        tensors[name.replace("layers.0", "layers.1")] = tensors[name]
    folder = with_tensors(tmp_path, tensors, num_hidden_layers=2)
    n_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    monkeypatch.setattr(folder_module, "machine_memory_bytes", lambda: int(0.6 * n_bytes))
    assert "GiB of weights" in refusal(folder, UnsupportedModel)
    for index in range(2):
        engine = open_engine(
            str(folder), block_size=16, device="cpu", threads=1, stage_index=index, n_stages=2
        )
        assert engine.stage.first_layer == index


def test_transformers_gets_the_configuration_that_was_inspected_and_reads_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config.json may name another one, and may have changed since it was inspected."""

    def read(*args: object, **more: object) -> None:
        raise AssertionError("a configuration is read from a file")

    for name in ("get_config_dict", "_get_config_dict", "from_pretrained"):
        monkeypatch.setattr(transformers.PreTrainedConfig, name, read)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)
    open_engine(str(make_llama(tmp_path)), block_size=16)


def test_the_inspected_configuration_is_what_transformers_itself_would_read(tmp_path: Path) -> None:
    for arch in ARCHITECTURES:
        folder = make_tiny_model(arch, tmp_path / arch)
        ours = _read_config(inspect_folder(folder))
        theirs = transformers.AutoConfig.from_pretrained(folder)
        assert type(ours) is type(theirs)
        assert ours.to_diff_dict() == theirs.to_diff_dict(), arch


def test_what_a_configuration_asks_of_the_hub_fails_at_once_while_a_model_is_made() -> None:
    """`local_files_only` does not hold for it."""
    backbone = {"model_type": "rf_detr", "backbone": "someone/model"}
    with hub_offline(), pytest.raises(OfflineModeIsEnabled):
        transformers.CONFIG_MAPPING["llava"].from_dict({"vision_config": backbone})
    assert not constants.HF_HUB_OFFLINE
