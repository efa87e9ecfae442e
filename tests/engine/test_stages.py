"""Engines of all stages of a model compute what one of all layers does, and may borrow from it."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as untyped_transformers

from halfmoon_engine.checkpoints import torch_loader
from halfmoon_engine.errors import BadEngineStage
from halfmoon_engine.interface import Draw, Run
from halfmoon_engine.load import open_engine
from halfmoon_engine.stages.model_cut import cut_model, stage_of
from halfmoon_engine.stages.stage_checks import cut_layers
from halfmoon_engine.stages.stage_model import StageModel
from halfmoon_engine.stages.stage_probe import check_cut
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.models.tiny_architectures import COMMON, TINY_ARCHITECTURES
from halfmoon_testing.models.tiny_models import ARCHITECTURES
from tests.engine.chained_engine import ChainedEngine
from tests.engine.driver import Driver, EngineOf, Reference, Tiny, open_tiny, prompt_of

transformers: Any = untyped_transformers

GREEDY = Draw(Sampling(temperature=0.0))
N_NEW = 4


@pytest.fixture(scope="module")
def chain_of(tiny: Tiny, native: str) -> Callable[..., Any]:
    """All stages of a tiny model, one layer each or so many stages, remembered."""
    known: dict[tuple[str, int], ChainedEngine] = {}

    def load(arch: str, n_stages: int = 0) -> ChainedEngine:
        n_stages = n_stages or {**COMMON, **TINY_ARCHITECTURES[arch][1]}["num_hidden_layers"]
        if (arch, n_stages) not in known:
            known[arch, n_stages] = ChainedEngine(
                [open_stage(tiny(arch), index, n_stages, native) for index in range(n_stages)]
            )
        return known[arch, n_stages]

    return load


def open_stage(folder: Path, index: int, n_stages: int, native: Any = "off", **more: Any) -> Any:
    return open_tiny(folder, native=native, stage_index=index, n_stages=n_stages, **more)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_ragged_batch_through_stages_writes_the_kv_of_one_engine(
    arch: str, chain_of: Callable[..., Any], engine_of: EngineOf
) -> None:
    whole, chained = engine_of(arch), chain_of(arch)
    assert chained.layout == whole.layout
    pools: list[bytes] = []
    tokens: list[Any] = []
    for engine in (whole, chained):
        driver = Driver(engine, 200)
        pages = {n: driver.pages_for(n) for n in (3, 40, 90)}
        first = [Run(prompt_of(n)[: n // 2], 0, pages[n], None) for n in pages]
        rest = [Run(prompt_of(n)[n // 2 :], n // 2, pages[n], GREEDY) for n in pages]
        engine.forward(first)
        tokens.append(engine.forward(rest))
        pools.append(bytes(driver.pool))
    assert tokens[0] == tokens[1]
    assert pools[0] == pools[1]
    assert {each.description for each in chained.stages} == {whole.description}


@pytest.mark.parametrize(
    ("arch", "n_layers"),
    [*((arch, [1, 3]) for arch in ("gemma3", "cohere2", "gpt_oss")),
     *((arch, [1, 2]) for arch in ("llama", "gpt2", "qwen3_moe"))],
)  # fmt: skip
def test_stages_of_several_layers_equal_generate(
    arch: str, n_layers: list[int], chain_of: Callable[..., Any], reference: Reference
) -> None:
    chained = chain_of(arch, 2)
    assert [each.stage.n_layers for each in chained.stages] == n_layers
    produced = Driver(chained, 200).generate(prompt_of(100), N_NEW, chunk=40)
    assert produced == reference(arch, prompt_of(100), N_NEW)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "granite"])
def test_stages_in_half_precision_write_the_kv_of_one_engine(
    arch: str, tiny: Tiny, native: Any, engine_of: EngineOf
) -> None:
    whole = engine_of(arch, dtype="bfloat16")
    n_stages = whole.layout.n_layers
    stages = [
        open_stage(tiny(arch), index, n_stages, native, dtype="bfloat16")
        for index in range(n_stages)
    ]
    drivers = [Driver(engine, 200) for engine in (whole, ChainedEngine(stages))]
    tokens = [driver.generate(prompt_of(100), N_NEW, chunk=30) for driver in drivers]
    assert tokens[0] == tokens[1]
    assert drivers[0].pool == drivers[1].pool


# What is loaded


@pytest.mark.parametrize("arch", ["llama", "granite", "gpt2", "qwen3_moe"])
def test_a_stage_holds_its_own_layers(
    arch: str, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = parameters_of(open_stage(tiny(arch), 0, 1))
    tied = arch == "granite"
    for index in range(3):
        caplog.clear()
        loaded = parameters_of(open_stage(tiny(arch), index, 3))
        assert {layer_of(name) for name in loaded} == {None, index}
        for name, size in loaded.items():
            assert whole[name] == size, name
        embeds = any("embed" in name or "wte" in name for name in loaded)
        assert embeds == (index == 0 or (tied and index == 2))
        assert ("lm_head.weight" in loaded) == (index == 2 and not tied)
        assert f"stage {index} of 3: layers {index} to {index} of 3 are loaded" in caplog.text
        assert f"{100 * sum(loaded.values()) / sum(whole.values()):.0f}% of" in caplog.text


def parameters_of(engine: Any) -> dict[str, int]:
    """Numbers of each parameter, none of which is without memory."""
    model = engine._runner._staged.model
    assert all(each.device.type == "cpu" for each in model.parameters())
    return {name: each.numel() for name, each in model.named_parameters()}


def layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


# What is refused


def test_more_stages_than_layers_are_refused_before_weights_are_read(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_loader, "_load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(BadEngineStage, match=r"n_stages is 4: the model has 3 layers.*at most 3"):
        open_stage(tiny("llama"), 0, 4)
    with pytest.raises(BadEngineStage, match="stage 3 of 3 does not exist: stages are 0 to 2"):
        open_stage(tiny("llama"), 3, 3)


def test_a_model_whose_layers_read_embeddings_of_their_own_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "gemma4_text", "num_hidden_layers": 4, "num_kv_shared_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = transformers.AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(BadEngineStage, match=r"'gemma4_text' can't be cut.*embeddings of its own"):
        stage_of(described, 0, 2)


def test_a_model_whose_layers_take_more_than_activations_is_refused() -> None:
    config = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 2})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    stage = cut_layers(2, 256, 0, 2)
    cut_model(model, stage)
    staged = StageModel(model, stage)
    check_cut(staged)

    def add_first(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return arguments, {**options, "first_values": arguments[0].mean()}

    (layer,) = staged.own_layers()
    handle = layer.register_forward_pre_hook(add_first, with_kwargs=True)
    with pytest.raises(BadEngineStage, match=r"layers take '.*first_values', which depends on the"):
        check_cut(staged)
    handle.remove()
    layer.register_forward_hook(lambda _module, _arguments, out: (out, out))
    with pytest.raises(BadEngineStage, match="its layers give a tuple"):
        check_cut(staged)


def test_a_model_whose_layers_are_not_found_is_refused() -> None:
    config = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 2})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.num_hidden_layers = 4
    with pytest.raises(BadEngineStage, match="it has 0 lists of 4 layers that attend"):
        cut_model(model, cut_layers(4, 256, 0, 2))


def lent(whole: Any, n_stages: int = 0) -> ChainedEngine:
    n_stages = n_stages or whole.layout.n_layers
    return ChainedEngine([whole.open_stage(index, n_stages) for index in range(n_stages)])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lent_stages_write_kv_and_choose_tokens_as_their_lender(
    arch: str, engine_of: EngineOf
) -> None:
    whole = engine_of(arch)
    drivers = [Driver(engine, 200) for engine in (whole, lent(whole))]
    tokens = [driver.generate(prompt_of(90), 4, chunk=30) for driver in drivers]
    assert tokens[0] == tokens[1]
    assert drivers[0].pool == drivers[1].pool


@pytest.mark.parametrize("arch", ["llama", "granite", "gpt2", "qwen3_moe", "gemma3"])
def test_lent_stages_hold_no_weights_beside_their_lenders(
    arch: str, tiny: Tiny, native: Any
) -> None:
    whole = open_tiny(tiny(arch), native=native)
    before = dict(weights_of(whole))
    assert sum(before.values()) > 0
    n_stages = whole.layout.n_layers
    stages = [whole.open_stage(index, n_stages) for index in range(n_stages)]
    for stage in stages:
        assert set(weights_of(stage)) < set(weights_of(whole)), "a weight of its own"
    assert {key for stage in stages for key in weights_of(stage)} == set(before)
    assert weights_of(whole) == before


def test_stages_outlive_their_lender(tiny: Tiny, native: Any, reference: Reference) -> None:
    stages = lent(open_tiny(tiny("llama"), native=native))
    produced = Driver(stages, 200).generate(prompt_of(60), 4, chunk=25)
    assert produced == reference("llama", prompt_of(60), 4)


@pytest.mark.parametrize("spec", ["fake://tiny?layers=3", "model"])
def test_a_stage_that_can_not_be_lent_is_refused_by_name(spec: str, engine_of: EngineOf) -> None:
    whole = engine_of("llama") if spec == "model" else open_engine(spec, block_size=16)
    with pytest.raises(BadEngineStage, match=r"n_stages is 4: the model has 3 layers.*at most 3"):
        whole.open_stage(0, 4)
    with pytest.raises(BadEngineStage, match="stage 3 of 3 does not exist: stages are 0 to 2"):
        whole.open_stage(3, 3)
    with pytest.raises(BadEngineStage, match="n_stages is 1: layers are lent to one of 2 stages"):
        whole.open_stage(0, 1)
    stage = whole.open_stage(1, 3)
    with pytest.raises(BadEngineStage, match="stage 1 of 3 has 1 layers of its model and can't"):
        stage.open_stage(0, 3)
    with pytest.raises(ValueError, match="run 0 wants a token or scores of stage 1"):
        stage.attach(memoryview(bytearray(stage.layout.block_bytes)))
        stage.forward([Run([1], 0, [0], GREEDY)])


def weights_of(engine: Any) -> dict[int, int]:
    """Bytes of weights by where they are: packed by the extension, or tensors of a model."""
    runner = engine._runner
    if hasattr(runner, "_packed"):
        return dict(_packed_weights(runner._packed.weights()))
    tensors = runner._staged.model.parameters()
    return {each.data_ptr(): each.nbytes for each in tensors}


def _packed_weights(parts: Iterator[Any]) -> Iterator[tuple[int, int]]:
    for part in parts:
        if isinstance(part, np.ndarray):
            yield torch.from_numpy(part).data_ptr(), part.nbytes
        else:
            yield id(part), part.n_bytes
