"""Mutated checkpoints: each is refused in one line, or loads and computes what transformers does.

`make fuzz N=5000 SEED=7` runs more of them.
"""

import json
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from halfmoon_engine.load import open_engine
from halfmoon_models.errors import MAX_ERROR_CHARS, ModelError
from halfmoon_models.folder_inspection import inspect_folder
from halfmoon_testing.fuzz_inputs import ABSURD_VALUES, n_fuzz_inputs, value_paths
from halfmoon_testing.models.llama_folders import safetensors_with_header, split_safetensors
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.fuzz.conftest import noted
from tests.nightly import by_day

N_MUTANTS = n_fuzz_inputs(by_day(50, at_night=1000))
#: No mutant may take longer or more; a healthy one takes a tenth of a second and 50 MiB.
MAX_S = 30.0
MAX_GROWTH_MIB = 1024

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
ABSURD: tuple[Any, ...] = (
    *ABSURD_VALUES, 3, 10**6, 10**12, 1e-30, 1e30, float("nan"), float("inf"), "llama",
    "../../etc/passwd", "x" * 10_000, [10**9], ["full_attention"] * 50, {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": 0, "rope_theta": 1e4},
)  # fmt: skip
#: Fields that tiny models don't have and that transformers, or a reader of ours, looks at.
FIELDS = (
    "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window",
    "attention_bias", "mlp_bias", "head_dim", "num_key_value_heads", "partial_rotary_factor",
    "pretraining_tp", "attention_dropout", "hidden_act", "rms_norm_eps", "num_experts",
    "text_config", "quantization_config", "auto_map", "architectures", "torch_dtype", "dtype",
    "is_decoder", "add_cross_attention", "get_text_config", "attn_implementation",
    "_attn_implementation", "chunk_size_feed_forward", "pruned_heads", "output_hidden_states",
    "return_dict", "per_layer_config", "base_model_tp_plan", "eos_token_id", "pad_token_id",
    "tie_word_embeddings",
)  # fmt: skip


def _change(dice: Random, content: Any, paths: list[tuple[Any, ...]]) -> str:
    path = dice.choice(paths)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    if dice.random() < 0.1 and isinstance(holder, dict):
        del holder[path[-1]]
        return f"without {path}"
    value = dice.choice(ABSURD)
    old = holder[path[-1]]
    if type(old) is int and dice.random() < 0.5:
        value = dice.choice([old + 1, old - 1, old * 2, old // 2, -old, old * 1000, 1 << 40])
    holder[path[-1]] = value
    return f"{path} = {str(value)[:60]!r}"


def mutate_config(dice: Random, folder: Path) -> str:
    name = dice.choice(JSON_FILES) if dice.random() < 0.35 else "config.json"
    content = json.loads((folder / name).read_text())
    if name == "config.json" and dice.random() < 0.35:
        field, value = dice.choice(FIELDS), dice.choice(ABSURD)
        content[field] = value
        what = f"{field} = {str(value)[:60]!r}"
    else:
        what = _change(dice, content, value_paths(content))
    (folder / name).write_text(json.dumps(content))
    return f"{name}: {what}"


def mutate_text(dice: Random, folder: Path) -> str:
    name = dice.choice(JSON_FILES)
    content = bytearray((folder / name).read_bytes())
    for _ in range(dice.choice([1, 1, 2, 8])):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    (folder / name).write_bytes(content)
    return f"{name}: bits"


def mutate_header(dice: Random, folder: Path) -> str:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    n = int.from_bytes(content[:8], "little")
    if dice.random() < 0.5:
        flipped = bytearray(content)
        for _ in range(dice.choice([1, 1, 2, 5])):
            flipped[dice.randrange(8 + n)] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        return "header: bits"
    header, data = split_safetensors(content)
    tensors = [name for name in header if name != "__metadata__"]
    one, other = dice.sample(tensors, 2)
    match dice.randrange(5):
        case 0:
            what = _change(dice, header, value_paths(header[one], (one,)))
        case 1:
            header[one], header[other] = header[other], header[one]
            what = f"{one} and {other} swapped"
        case 2:
            header[one + dice.choice(["x", ".scales", ".0", "\0"])] = header.pop(one)
            what = f"{one} renamed"
        case 3:
            header[one]["shape"] = header[one]["shape"][::-1]
            what = f"{one} transposed"
        case _:
            header[one]["data_offsets"] = header[other]["data_offsets"]
            what = f"{one} over {other}"
    path.write_bytes(safetensors_with_header(header, data))
    return f"header: {what}"


def truncate(dice: Random, folder: Path) -> str:
    name = dice.choice(["model.safetensors", *JSON_FILES])
    content = (folder / name).read_bytes()
    kept = dice.randrange(len(content))
    (folder / name).write_bytes(content[:kept])
    return f"{name}: cut after {kept} bytes"


def mutate_data(dice: Random, folder: Path) -> str:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    n = 8 + int.from_bytes(content[:8], "little")
    for _ in range(dice.choice([1, 20, 2000])):
        content[dice.randrange(n, len(content))] = dice.choice([0, 0x7F, 0x80, 0xFF])
    path.write_bytes(content)
    return "weights: bytes"


MUTATIONS: tuple[tuple[Callable[[Random, Path], str], float], ...] = (
    (mutate_config, 0.45),
    (mutate_header, 0.25),
    (truncate, 0.1),
    (mutate_text, 0.1),
    (mutate_data, 0.1),
)


def reference_logits(folder: Path, tokens: list[int]) -> Any:
    """What transformers alone computes of this folder."""
    import torch
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    # It looks into the field for code, which it is not to run: a number there ends it.
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(fields))
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    # It reads the field before it takes the argument: a number there ends it.
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager", local_files_only=True
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def check_right(folder: Path, engine: Any) -> None:
    """A loaded mutant draws the token that transformers finds likeliest."""
    from halfmoon_engine.interface import Draw, Run
    from halfmoon_protocol.sampling import Sampling

    # A model of a tiny context, which its numbers say, has fewer.
    tokens = [5, 9, 33, 7, 81, 2, 64][: engine.max_context]
    logits = reference_logits(folder, tokens)
    engine.attach(memoryview(bytearray(2 * engine.layout.block_bytes)))
    draw = Draw(Sampling(temperature=0.0))
    (token,) = engine.forward([Run(tokens, 0, [1], draw)])
    assert token is not None
    spread = float(logits.std())
    assert float(logits.max() - logits[token]) <= 0.02 * spread, "another token than transformers'"


@pytest.mark.timeout(14_400)
def test_mutated_checkpoints_are_refused_in_a_line_or_right(tmp_path: Path, dice: Random) -> None:
    originals = [
        make_tiny_model(arch, tmp_path / "originals" / arch)
        for arch in ("llama", "qwen3", "gemma2")
    ]
    open_engine(str(originals[0]), block_size=16, device="cpu", threads=1)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends: Counter[str] = Counter()
    slowest = (0.0, "")
    for number in range(N_MUTANTS):
        folder = tmp_path / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(dice.choice(originals), folder)
        mutation = dice.choices(*zip(*MUTATIONS, strict=True))[0]
        what = mutation(dice, folder)
        began = time.monotonic()
        with noted(f"mutant {number}: {what}"):
            try:
                engine = open_engine(str(folder), block_size=16, device="cpu", threads=1)
                check_right(folder, engine)
                ends["right"] += 1
            except ModelError as error:
                line = str(error)
                assert line.isprintable() and 0 < len(line) <= MAX_ERROR_CHARS, line
                ends[type(error).__name__] += 1
                try:
                    inspect_folder(folder)
                    ends["seen only by loading it"] += 1
                except ModelError:
                    pass
        slowest = max(slowest, (time.monotonic() - began, what))
        assert slowest[0] < MAX_S, slowest
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before) / 1024
    print(f"{dict(ends)}, slowest {slowest[0]:.1f} s ({slowest[1]}), memory +{grown:.0f} MiB")
    assert ends["right"] and ends["BrokenCheckpoint"]
    assert ends["UnsupportedModel"] or N_MUTANTS < 150  # few mutants are
    assert grown < MAX_GROWTH_MIB


@pytest.fixture(autouse=True)
def quiet() -> None:
    """What transformers says of each of them."""
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    transformers.logging.disable_progress_bar()
