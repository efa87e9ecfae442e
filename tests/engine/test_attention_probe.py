"""The probe sees what a model does: what is no causal language model over pages is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as untyped_transformers

from halfmoon_engine.attention.attention_probe import probe_attention
from halfmoon_engine.load import open_engine
from halfmoon_engine.stages.stage_model import StageModel
from halfmoon_models import model_kinds
from halfmoon_models.errors import ModelError, UnsupportedModel
from halfmoon_testing.models.shrunken_configs import shrunken_config
from halfmoon_testing.models.tiny_models import make_tiny_model

transformers: Any = untyped_transformers

ENCODERS = [
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta",
    "xlm-roberta-xl",
]  # fmt: skip


def make(kind: str, folder: Path, **options: Any) -> Path:
    """A folder with a small random model of a type."""
    torch.manual_seed(0)
    usual = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **{**usual, **options})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def refuse(folder: Path, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        open_engine(str(folder), block_size=16, device="cpu")


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("known", [True, False])
def test_an_encoder_is_refused_known_or_not(
    kind: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"intermediate_size": 32, "max_position_embeddings": 64}
    make(kind, tmp_path, **sizes, pad_token_id=0, eos_token_id=2)
    if not known:
        monkeypatch.setattr(model_kinds, "ENCODERS", frozenset())
    refuse(tmp_path, "encoder" if known else f"'{kind}'")


class _Mixer(torch.nn.Module):
    """Adds a bit of a neighbour's activations to each token's.

    With `bounded`, not of another sequence's: it knows how the probe lays its two out.
    """

    def __init__(self, inner: torch.nn.Module, shift: int, bounded: bool) -> None:
        super().__init__()
        self.inner = inner
        self.shift = shift
        self.bounded = bounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        neighbours = torch.roll(x, self.shift, dims=1).clone()
        if self.bounded:
            first, last = ([0, 19], [18, 31]) if x.shape[1] == 32 else ([0], [-1])
            neighbours[:, first if self.shift > 0 else last] = 0
        return out + 0.03 * neighbours


@pytest.fixture
def model(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_small_model_whose_attention_adds_little_passes(model: Any, dtype: torch.dtype) -> None:
    shape = probe_attention(StageModel(model.to(dtype))).shape
    assert (shape.n_layers, shape.head_dim) == (2, 8)


def test_an_option_of_attention_that_ours_does_not_read_is_refused(model: Any) -> None:
    """Short prompts may not show it: a sparse attention sees all of their few blocks."""
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *given, **options: forward(
        *given, **options, block_indices=torch.arange(2)
    )
    with pytest.raises(UnsupportedModel, match=r"'llama'.*takes block_indices.*choose one"):
        probe_attention(StageModel(model))


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ImportError, KeyError])
def test_a_model_that_fails_with_our_attention_alone_is_refused(
    error: type[Exception], model: Any
) -> None:
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def fail(*given: Any, **options: Any) -> Any:
        if model.config._attn_implementation != "eager":
            raise error("The expanded size of\nthe tensor (48)")
        return forward(*given, **options)

    attention.forward = fail
    words = f"'llama'.*does not run with paged attention .{error.__name__}: .*; served are .*choose"
    with pytest.raises(UnsupportedModel, match=words):
        probe_attention(StageModel(model))


def test_values_of_another_size_are_named_in_place_of_what_torch_says(tmp_path: Path) -> None:
    config = shrunken_config("mimo_v2_flash")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refuse(tmp_path, r"heads of several sizes .head_dim 16, v_head_dim 8")
    # Where the file leaves the size to transformers, the probe sees it.
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    words = r"'mimo_v2_flash'.*heads of 16, .*heads of 8|several"
    with pytest.raises(UnsupportedModel, match=words):
        probe_attention(StageModel(model))


@pytest.mark.parametrize(
    ("shift", "bounded", "words"),
    [
        (1, False, "something else with paged attention|of other sequences"),
        (-1, False, "something else with paged attention|that come later"),
        (1, True, "something else from kept keys and values"),
        (-1, True, "that come later"),
    ],
)
def test_mixing_tokens_beside_attention_is_refused(
    model: Any, shift: int, bounded: bool, words: str
) -> None:
    model.model.layers[0].mlp = _Mixer(model.model.layers[0].mlp, shift, bounded)
    with pytest.raises(UnsupportedModel, match=words):
        probe_attention(StageModel(model))


def test_a_layer_that_is_not_causal_is_refused_where_its_logits_hardly_show_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    def causal_mask(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(modeling_llama, "create_causal_mask", causal_mask)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 1e-3
    with pytest.raises(UnsupportedModel, match="attends otherwise than a causal language model"):
        probe_attention(StageModel(model))


def test_weights_that_are_no_numbers_are_refused(model: Any) -> None:
    model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        probe_attention(StageModel(model))


TWICE = {
    "hidden_size": 64, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN_CODE = {
    "max_position_embeddings": 64, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {
    "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 8,
    "intermediate_size": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
WINDOW = {
    "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "intermediate_size": 32,
    "use_sliding_window": True, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        *(
            (kind, {**TWICE, "initializer_range": spread}, "times in 2 layers")
            for kind in ("diffllama", "hrm_text")
            for spread in (0.02, 0.2)
        ),
        *(
            (kind, OWN_CODE, f"'{kind}'.*attends in code of its own")
            for kind in ("falcon", "bloom", "mpt", "gptj", "codegen")
        ),
        ("gemma4_text", HEADS, "keys and values of several shapes"),
        ("gemma4_text", SHARED, "'gemma4_text'.*(several shapes|another layer)"),
        ("qwen2_moe", WINDOW, "window"),
    ],
)
def test_a_model_that_attends_otherwise_is_refused_by_the_probe(
    kind: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    refuse(make(kind, tmp_path, **options), words)


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_model_whose_scores_are_all_equal_is_refused(cap: str, tmp_path: Path) -> None:
    make_tiny_model("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[cap] = 0.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse(tmp_path, f"its {cap} is 0")
