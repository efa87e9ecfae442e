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

ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
)


def make_encoder(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("known", [True, False])
def test_an_encoder_is_refused_known_or_not(
    kind: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_encoder(kind, tmp_path)
    if not known:
        monkeypatch.setattr(model_kinds, "ENCODERS", frozenset())
    with pytest.raises(UnsupportedModel, match="encoder" if known else f"'{kind}'"):
        open_engine(str(tmp_path), block_size=16, device="cpu")


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
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_a_small_random_model_whose_attention_adds_little_passes(model: Any) -> None:
    assert probe_attention(StageModel(model)).shape.n_layers == 2


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
def test_a_model_that_fails_with_our_attention_alone_is_refused_by_its_type(
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
    with pytest.raises(
        UnsupportedModel, match=r"heads of several sizes .head_dim 16, v_head_dim 8"
    ):
        open_engine(str(tmp_path), block_size=16, device="cpu")
    # Where the file leaves the size to transformers, the probe sees it.
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(
        UnsupportedModel, match=r"'mimo_v2_flash'.*heads of 16, .*heads of 8|several"
    ):
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
def test_a_model_that_mixes_tokens_beside_attention_is_refused(
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


def test_half_precision_passes_too(model: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert probe_attention(StageModel(model.to(dtype))).shape.head_dim == 8


@pytest.mark.parametrize("spread", [0.02, 0.2])
@pytest.mark.parametrize("kind", ["diffllama", "hrm_text"])
def test_a_model_that_attends_twice_in_a_layer_is_refused(
    kind: str, spread: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=spread,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="times in 2 layers"):
        open_engine(str(tmp_path), block_size=16, device="cpu")


@pytest.mark.parametrize("kind", ["falcon", "bloom", "mpt", "gptj", "codegen"])
def test_a_model_whose_attention_is_code_of_its_own_is_refused(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rotary_dim=8,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="attends in code of its own"):
        open_engine(str(tmp_path), block_size=16, device="cpu")


def test_a_model_whose_layers_have_heads_of_different_sizes_is_refused(tmp_path: Path) -> None:
    config = transformers.Gemma4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="keys and values of several shapes"):
        open_engine(str(tmp_path), block_size=16, device="cpu")


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_model_whose_scores_are_all_equal_is_refused(cap: str, tmp_path: Path) -> None:
    make_tiny_model("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[cap] = 0.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"its {cap} is 0"):
        open_engine(str(tmp_path), block_size=16, device="cpu")
