"""A worker's look at its model's tokenizer, which is compared with transformers' at the start."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoTokenizer

from halfmoon_engine.checkpoints import model_tokenizer
from halfmoon_engine.checkpoints.model_tokenizer import check_same_tokens, read_model_tokenizer
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError, UnsupportedModel
from halfmoon_models.tokenizer.tokenizer_builder import build_tokenizer
from tests.engine.driver import Tiny


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a tiny model to change."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def change(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


def config_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_text())
    assert isinstance(content, dict)
    return content


def test_a_text_that_becomes_other_tokens_is_refused_by_name(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer(folder)
    ours.fast.normalizer = normalizers.Lowercase()
    with pytest.raises(
        UnsupportedModel, match=r"model: its tokenizer .*half moon.*save_pretrained"
    ):
        check_same_tokens(folder, ours, theirs)


def test_an_added_token_that_one_lacks_is_refused_by_name(folder: Path) -> None:
    ours = build_tokenizer(folder)
    change(folder, "tokenizer_config.json", additional_special_tokens=["<|new|>"])
    theirs = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(UnsupportedModel, match=r"is None here and .*<\|new\|>.* there"):
        check_same_tokens(folder, ours, theirs)


def test_a_worker_does_not_start_with_a_tokenizer_that_is_read_otherwise(folder: Path) -> None:
    """Its class makes the tokenizer anew in a way that is not known here."""
    change(
        folder, "tokenizer_config.json", tokenizer_class="RobertaTokenizer", add_prefix_space=True
    )
    with pytest.raises(UnsupportedModel, match="RobertaTokenizer"):
        open_engine(str(folder), block_size=16)


def test_a_tokenizer_that_transformers_cannot_load_is_served_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder, "tokenizer_config.json", model_max_length=1, padding_side="nowhere")
    with caplog.at_level(logging.WARNING, model_tokenizer.__name__):
        assert read_model_tokenizer(folder, config_of(folder)) is not None
    assert "tokens are not compared" in caplog.text


@pytest.mark.parametrize("name", ["AutoModel", "AutoProcessor", "LlamaForCausalLM", "utils"])
def test_nothing_but_a_tokenizer_is_loaded_by_the_name_of_its_class(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers takes any name of its own for a tokenizer's, and calls its `from_pretrained`."""
    change(folder, "tokenizer_config.json", tokenizer_class=name)
    with caplog.at_level(logging.WARNING, model_tokenizer.__name__):
        assert read_model_tokenizer(folder, config_of(folder)) is not None
    assert f"tokenizer_class in tokenizer_config.json is '{name}'" in caplog.text


def test_an_answer_ends_at_the_tokenizers_end_too(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=0)
    change(folder, "config.json", eos_token_id=0)
    assert open_engine(str(folder), block_size=16).eos_token_ids == (0, 2)
    change(folder, "tokenizer_config.json", eos_token=None)
    assert open_engine(str(folder), block_size=16).eos_token_ids == (0, 2)  # as the template has it


def test_an_added_token_without_an_embedding_is_named_at_the_start(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder, "tokenizer_config.json", additional_special_tokens=["<|new|>"])
    config = {**config_of(folder), "vocab_size": len(AutoTokenizer.from_pretrained(folder)) - 1}
    with caplog.at_level(logging.WARNING, model_tokenizer.__name__):
        read_model_tokenizer(folder, config)
    assert f"embeds {config['vocab_size']} tokens" in caplog.text
    assert "'<|new|>'" in caplog.text


def test_ordinary_tokens_without_an_embedding_are_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"ids up to \d+ .* embeds 300 tokens"):
        read_model_tokenizer(folder, {**config_of(folder), "vocab_size": 300})


def _shard(folder: Path, index: dict[str, Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    content = {"weight_map": weight_map, **index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "index", [{}, {"metadata": None}, {"metadata": []}, {"metadata": "x"}, {"metadata": {}}]
)
def test_an_index_without_usable_metadata_is_loaded(folder: Path, index: dict[str, Any]) -> None:
    _shard(folder, index)
    assert open_engine(str(folder), block_size=16).name == "model"
