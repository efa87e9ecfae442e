"""The way out that a quantised checkpoint's refusal names is followed as it stands, and works."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as untyped_transformers
from safetensors.torch import load_file as _load_file
from safetensors.torch import save_file as _save_file

from halfmoon_engine.checkpoints.dequantise import dequantise
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import BrokenCheckpoint, ModelError, UnsupportedModel
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import Driver, open_tiny

transformers: Any = untyped_transformers
load_file: Any = _load_file
save_file: Any = _save_file
WEIGHTS = "model.safetensors"
PROMPT = [(37 * i + 11) % 300 for i in range(40)]
BLOCK = 48
#: What stands in the place of a tensor.
Pack = Callable[[str, Any], dict[str, Any]]


def quantise(folder: Path, make: Pack, **fields: Any) -> Path:
    """Replace tensors of a tiny model by what `make` gives for each, and say so in config.json."""
    tensors = load_file(folder / WEIGHTS)
    packed = {
        new: part.contiguous()
        for name, each in tensors.items()
        for new, part in make(name, each).items()
    }
    save_file(packed, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))
    return folder


def of_projections(pack: Pack) -> Pack:
    """Pack projections, and leave other tensors as they are."""

    def pack_some(name: str, tensor: Any) -> dict[str, Any]:
        return pack(name, tensor) if name.endswith("_proj.weight") else {name: tensor}

    return pack_some


@of_projections
def in_blocks(name: str, tensor: Any) -> dict[str, Any]:
    """FP8 with a scale for each block, as DeepSeek and Qwen publish it."""
    rows, columns = (-(-n // BLOCK) for n in tensor.shape)
    scales = torch.zeros(rows, columns)
    whole = torch.zeros_like(tensor)
    for i in range(rows):
        for j in range(columns):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = tensor[block].abs().max() / 448
            whole[block] = tensor[block] / scales[i, j]
    return {name: whole.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


@of_projections
def as_a_whole(name: str, tensor: Any) -> dict[str, Any]:
    """FP8 with one scale for each tensor."""
    scale = tensor.abs().max() / 448
    packed = (tensor / scale).to(torch.float8_e4m3fn)
    input_scale = {name.replace(".weight", ".input_scale"): torch.ones(())}
    return {name: packed, f"{name}_scale": scale, **input_scale}


@of_projections
def by_rows(name: str, tensor: Any) -> dict[str, Any]:
    """FP8 with a scale for each row."""
    scales = tensor.abs().amax(dim=1, keepdim=True) / 448
    return {name: (tensor / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}


def in_mxfp4(name: str, tensor: Any) -> dict[str, Any]:
    """Random experts in MXFP4, as gpt-oss publishes them."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    dice = torch.Generator().manual_seed(len(name))
    experts, n_in, n_out = tensor.shape
    blocks = (experts, n_out, n_in // 32, 16)
    return {
        f"{name}_blocks": torch.randint(256, blocks, generator=dice, dtype=torch.uint8),
        f"{name}_scales": torch.randint(122, 127, blocks[:3], generator=dice, dtype=torch.uint8),
    }


def greedy(model: Any, n: int) -> list[int]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(n):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def follow(folder: Path, target: Path) -> Path:
    """Do what the refusal of a folder says, literally."""
    with pytest.raises(UnsupportedModel, match="is quantised with") as refused:
        open_engine(str(folder), block_size=16)
    command = re.search(r"\((python -m \S+) FOLDER NEW_FOLDER\)", str(refused.value))
    assert command is not None, refused.value
    words = [sys.executable, *shlex.split(command[1])[1:], str(folder), str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


def test_mxfp4_is_written_as_transformers_reads_it_and_served(tmp_path: Path) -> None:
    folder = make_tiny_model("gpt_oss", tmp_path / "mxfp4")
    quantise(folder, in_mxfp4, quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    target = follow(folder, tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
        attn_implementation="eager",
    )
    written = load_file(target / WEIGHTS)
    for name, tensor in model.state_dict().items():
        assert torch.equal(written[name], tensor), name
    engine = open_tiny(target)
    answer = Driver(engine, 64).generate(PROMPT, 8)
    assert answer == greedy(model.float(), 8)


@pytest.mark.parametrize(
    ("pack", "fields"),
    [
        (in_blocks, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
        (as_a_whole, {"quant_method": "fp8"}),
        (by_rows, {"quant_method": "fbgemm_fp8"}),
    ],
)
def test_fp8_is_written_whole_and_served(
    pack: Pack, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path / "fp8")
    before = load_file(folder / WEIGHTS)
    quantise(folder, pack, **fields)
    target = follow(folder, tmp_path / "whole")
    written = load_file(target / WEIGHTS)
    assert written.keys() == before.keys()
    for name, tensor in before.items():
        # Three bits of mantissa: a sixteenth at most, and the rounding of bfloat16.
        assert torch.allclose(written[name].float(), tensor, rtol=0.07, atol=0.002), name
        assert written[name].dtype == torch.bfloat16
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    engine = open_tiny(target)
    assert Driver(engine, 64).generate(PROMPT, 8) == greedy(model, 8)


def test_shards_and_scales_in_another_shard_are_written_with_their_index(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "fp8")
    quantise(folder, in_blocks, quant_method="fp8", weight_block_size=[BLOCK, BLOCK])
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    place = {name: f"model-{int('scale' in name)}.safetensors" for name in tensors}
    for file in set(place.values()):
        part = {name: tensor for name, tensor in tensors.items() if place[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": place}))
    dequantise(folder, tmp_path / "whole")
    engine = open_tiny(tmp_path / "whole")
    assert engine.layout.n_layers == 3


def test_what_can_not_be_written_whole_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "whole"

    def without_scales(name: str, tensor: Any) -> dict[str, Any]:
        return {key: part for key, part in in_blocks(name, tensor).items() if "scale" not in key}

    def with_few_scales(name: str, tensor: Any) -> dict[str, Any]:
        parts = in_blocks(name, tensor)
        return {
            key: part[:1, :1].repeat(1, 3) if "scale" in key else part
            for key, part in parts.items()
        }

    @of_projections
    def in_int4(name: str, tensor: Any) -> dict[str, Any]:
        return {name.replace(".weight", ".qweight"): tensor.int()}

    cases: list[tuple[Any, type[ModelError], str]] = [
        (without_scales, BrokenCheckpoint, "in FP8 without scales"),
        (with_few_scales, BrokenCheckpoint, "do not cover it in blocks"),
        (in_int4, UnsupportedModel, "qweight"),
    ]
    for number, (pack, kind, words) in enumerate(cases):
        folder = make_tiny_model("llama", tmp_path / str(number))
        quantise(folder, pack, quant_method="fp8", weight_block_size=[BLOCK, BLOCK])
        with pytest.raises(kind, match=words):
            dequantise(folder, target)
        assert not target.exists()
    target.mkdir()
    with pytest.raises(UnsupportedModel, match="name a new folder"):
        dequantise(folder, target)
