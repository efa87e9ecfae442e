"""An engine of all layers lends its layers to stages, which compute the same and copy no weight."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from halfmoon_engine.errors import BadEngineStage
from halfmoon_engine.interface import Draw, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.models.tiny_models import ARCHITECTURES
from tests.engine.chained_engine import ChainedEngine
from tests.engine.driver import Driver, EngineOf, Reference, Tiny, open_tiny, prompt_of

GREEDY = Draw(Sampling(temperature=0.0))


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


def test_an_engine_and_its_stages_serve_at_once(engine_of: EngineOf, reference: Reference) -> None:
    whole = engine_of("qwen3")
    alone, in_stages = Driver(whole, 200), Driver(lent(whole), 200)
    for n in (3, 50, 100):
        expected = reference("qwen3", prompt_of(n), 3)
        assert alone.generate(prompt_of(n), 3, chunk=20) == expected
        assert in_stages.generate(prompt_of(n), 3, chunk=20) == expected


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
