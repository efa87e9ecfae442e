"""What is no causal language model over pages is refused: by its configuration, or by the probe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as untyped_transformers

from halfmoon_engine.attention.attention_probe import probe_attention
from halfmoon_engine.interface import Run
from halfmoon_engine.load import open_engine
from halfmoon_engine.stages.stage_model import StageModel
from halfmoon_models import model_kinds
from halfmoon_models.errors import ModelError, UnsupportedModel
from halfmoon_testing.models.shrunken_configs import shrunken_config
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import Driver, EngineOf

transformers: Any = untyped_transformers


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


@pytest.mark.parametrize("kind", ["bert", "big_bird", "roberta", "roformer"])
def test_an_encoder_that_is_not_known_as_one_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"intermediate_size": 32, "max_position_embeddings": 64}
    make(kind, tmp_path, **sizes, pad_token_id=0, eos_token_id=2)
    monkeypatch.setattr(model_kinds, "ENCODERS", frozenset())
    refuse(tmp_path, f"'{kind}'")


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


HEADS = {
    "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
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
        ("bloom", {"max_position_embeddings": 64}, "'bloom'.*attends in code of its own"),
        ("gemma4_text", HEADS, "keys and values of several shapes"),
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


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen3_next"}, "'qwen3_next'.*linear_attention"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'.*latent attention"),
        ({"model_type": "kimi_k25", "text_config": {"kv_lora_rank": 512}}, "'kimi_k25'.*latent"),
        (
            {"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128},
            "'mimo_v2_flash'.*head_dim 192, v_head_dim 128.*choose one",
        ),
        (
            {"model_type": "gemma4", "text_config": {"head_dim": 256, "global_head_dim": 512}},
            "'gemma4'.*head_dim 256, global_head_dim 512",
        ),
        (
            {"model_type": "some_omni", "thinker_config": {"text_config": {"kv_lora_rank": 8}}},
            "'some_omni'.*latent attention",
        ),
        ({"model_type": "gemma4", "text_config": {"num_kv_shared_layers": 4}}, "another layer's"),
        ({"model_type": "gemma3n_text"}, "'gemma3n_text'.*another layer's keys"),
        ({"model_type": "llama4_text"}, "'llama4_text'.*chunked_attention"),
    ],
)
def test_an_unfit_config_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason):
        open_engine(str(tmp_path), block_size=16)


def test_a_token_outside_the_vocabulary_is_refused(engine_of: EngineOf) -> None:
    driver = Driver(engine_of("llama"), 32)
    for token in (384, -1):
        with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 384"):
            driver.engine.forward([Run([token], 0, [0], None)])
