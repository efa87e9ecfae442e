"""Models that a paged pool can't hold are refused by name and reason, before they serve."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as untyped_transformers

from halfmoon_engine.load import open_engine
from halfmoon_models.errors import UnsupportedModel
from tests.engine.driver import Driver, EngineOf, Tiny

transformers: Any = untyped_transformers


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "'mamba'.*linear_attention|'mamba'.*no attention heads"),
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
        (
            {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
            "'llama'.*dynamic rotary",
        ),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "later tokens"),
    ],
)
def test_an_unfit_config_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason):
        open_engine(str(tmp_path), block_size=16)


def test_long_rotary_scaling_is_served_up_to_its_original_length() -> None:
    from halfmoon_engine.checkpoints.architecture import max_context

    config = transformers.Phi3Config(
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48, "original_max_position_embeddings": 1024,
        },
    )  # fmt: skip
    assert max_context(config) == 1024


def test_a_local_folder_never_asks_the_hub(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    engine = open_engine(str(tiny("llama")), block_size=16)
    assert engine.name == "llama"
    assert engine.eos_token_ids == (0, 2)
    assert engine.max_context == 8192
    assert open_engine(str(tiny("llama")), block_size=16, served_name="moon").name == "moon"


def test_a_token_outside_the_vocabulary_is_refused(engine_of: EngineOf) -> None:
    from halfmoon_engine.interface import Run

    driver = Driver(engine_of("llama"), 32)
    for token in (384, -1):
        with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 384"):
            driver.engine.forward([Run([token], 0, [0], None)])
