"""Fake engines of all stages compute together what one fake engine of all layers computes."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_engine.errors import BadEngineStage
from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_engine.interface import Draw, Run, StageActivations
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling
from tests.engine.chained_engine import ChainedEngine

GREEDY = Draw(Sampling(temperature=0.0))
MODEL = FakeModelSpec(layers=6, max_context=512, vocab=2**32)
N_PAGES = 40


def chain(n_stages: int, model: FakeModelSpec = MODEL) -> tuple[ChainedEngine, bytearray]:
    stages = [FakeEngine(model, stage_index=i, n_stages=n_stages) for i in range(n_stages)]
    engine = ChainedEngine(stages)
    pool = bytearray(N_PAGES * engine.layout.block_bytes)
    engine.attach(memoryview(pool))
    return engine, pool


def prefill(engine: ChainedEngine | FakeEngine, prompt: list[int], edges: list[int]) -> object:
    """Compute a prompt in chunks on pages in a random order; return the token that follows."""
    pages = random.Random(3).sample(range(N_PAGES), engine.layout.blocks_for(len(prompt)))
    token: object = None
    for start, end in pairwise(edges):
        draw = GREEDY if end == len(prompt) else None
        (token,) = engine.forward([Run(prompt[start:end], start, pages, draw)])
    return token


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=120),
    cuts=st.lists(st.integers(1, 119), max_size=4),
    n_stages=st.sampled_from([1, 2, 3, 6]),
)
def test_chained_stages_draw_the_token_and_write_the_kv_of_one_engine(
    prompt: list[int], cuts: list[int], n_stages: int
) -> None:
    edges = sorted({0, len(prompt), *(cut for cut in cuts if cut < len(prompt))})
    engine, pool = chain(n_stages)
    whole = FakeEngine(MODEL)
    expected_pool = bytearray(len(pool))
    whole.attach(memoryview(expected_pool))
    assert prefill(engine, prompt, edges) == prefill(whole, prompt, edges)
    assert pool == expected_pool
    assert whole.expected(prompt, 1) == [prefill(engine, prompt, edges)]


def test_a_ragged_batch_through_stages_draws_each_sequences_own_token() -> None:
    engine, _ = chain(3)
    prompts = [list(range(3)), list(range(50, 90)), [7]]
    pages = [[0], [5, 2, 9], [30]]
    engine.forward([Run(prompts[1][:20], 0, pages[1], None)])
    starts = (0, 20, 0)
    tokens = engine.forward(
        [Run(p[n:], n, at, GREEDY) for p, n, at in zip(prompts, starts, pages, strict=True)]
    )
    assert tokens == [FakeEngine(MODEL).expected(prompt, 1)[0] for prompt in prompts]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_changed_byte_of_activations_changes_the_token(data: st.DataObject) -> None:
    prompt, pages = list(range(40)), [0, 1, 2]
    first, last = (FakeEngine(MODEL, stage_index=i, n_stages=2) for i in range(2))
    for engine in (first, last):
        engine.attach(memoryview(bytearray(3 * engine.layout.block_bytes)))
    between = bytearray(30 * first.stage.activation_bytes)
    for start, end in ((0, 10), (10, 40)):
        size = (end - start) * first.stage.activation_bytes
        rows = memoryview(between)[:size]
        first.forward(
            [Run(prompt[start:end], start, pages, None)], activations=StageActivations(None, rows)
        )
        draw = GREEDY if end == 40 else None
        run = Run(prompt[start:end], start, pages, draw)
        (token,) = last.forward([run], activations=StageActivations(rows, None))
    assert token == FakeEngine(MODEL).expected(prompt, 1)[0]
    at = data.draw(st.integers(0, len(between) - 1), "byte")
    between[at] ^= data.draw(st.integers(1, 255), "flipped bits")
    (changed,) = last.forward([run], activations=StageActivations(memoryview(between), None))
    assert changed != token


def test_a_stage_names_its_layers_and_the_model_that_all_stages_share() -> None:
    whole = FakeEngine(MODEL)
    stages = [FakeEngine(MODEL, stage_index=i, n_stages=3) for i in range(3)]
    assert [each.stage.first_layer for each in stages] == [0, 1, 3]
    assert [each.stage.n_layers for each in stages] == [1, 2, 3]
    assert {each.layout for each in stages} == {whole.layout}
    assert {each.layout.model for each in stages} == {whole.layout.model}
    assert whole.stage.is_whole and whole.stage.n_layers == 6
    assert {each.stage.activation_bytes for each in stages} == {16}


def test_a_stage_takes_its_share_of_the_simulated_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    engine = FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.001, layers=4), n_stages=2)
    assert engine.stage.n_layers == 1
    engine.attach(memoryview(bytearray(4 * engine.layout.block_bytes)))
    rows = memoryview(bytearray(30 * engine.stage.activation_bytes))
    engine.forward([Run([1] * 30, 0, [0, 1], None)], activations=StageActivations(None, rows))
    assert slept == pytest.approx([0.01])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_costs_of_a_stage_are_measured(index: int) -> None:
    engine = FakeEngine(MODEL, stage_index=index, n_stages=3)
    engine.attach(memoryview(bytearray(N_PAGES * engine.layout.block_bytes)))
    prefill_cost, _ = engine.measure()
    assert max(prefill_cost.c0_s, prefill_cost.c1_s, prefill_cost.c2_s) > 0


@pytest.mark.parametrize(
    ("index", "n_stages", "named"),
    [
        (2, 2, "stage 2 of 2 does not exist: stages are 0 to 1"),
        (-1, 2, "stage -1 of 2"),
        (0, 0, "n_stages is 0"),
        (0, 7, "n_stages is 7: the model has 6 layers.*choose at most 6"),
    ],
)
def test_a_stage_that_can_not_be_is_refused_by_name(index: int, n_stages: int, named: str) -> None:
    with pytest.raises(BadEngineStage, match=named):
        open_engine("fake://tiny?layers=6", block_size=16, stage_index=index, n_stages=n_stages)


def rows(n_bytes: int, *, readonly: bool = False) -> memoryview:
    return memoryview(bytes(n_bytes)) if readonly else memoryview(bytearray(n_bytes))


@pytest.mark.parametrize(
    ("index", "draw", "activations", "named"),
    [
        (0, GREEDY, StageActivations(None, rows(48)), "run 0 wants a token.*of stage 0.*stage 2"),
        (0, None, None, "stage 0 of 3 needs outgoing activations of 48 bytes, none"),
        (0, None, StageActivations(rows(48), rows(48)), "stage 0 of 3 has no incoming"),
        (1, None, StageActivations(None, rows(48)), "stage 1 of 3 needs incoming"),
        (1, None, StageActivations(rows(47), rows(48)), "48 contiguous bytes of incoming.*47 were"),
        (1, None, StageActivations(rows(48), rows(96)), "48 contiguous bytes of outgoing.*96 were"),
        (1, None, StageActivations(rows(48), rows(96)[::2]), "contiguous bytes of outgoing"),
        (1, None, StageActivations(rows(48), rows(48, readonly=True)), "read-only"),
        (2, GREEDY, StageActivations(rows(48), rows(48)), "stage 2 of 3 has no outgoing"),
    ],
)
def test_activations_that_do_not_fit_are_refused_by_name(
    index: int, draw: Draw | None, activations: StageActivations | None, named: str
) -> None:
    engine = FakeEngine(MODEL, stage_index=index, n_stages=3)
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    with pytest.raises(ValueError, match=named):
        engine.forward([Run([1, 2, 3], 0, [0], draw)], activations=activations)


def test_an_engine_of_all_layers_takes_no_activations() -> None:
    engine = FakeEngine(MODEL)
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    with pytest.raises(ValueError, match="stage 0 of 1 has no incoming"):
        engine.forward([Run([1], 0, [0], None)], activations=StageActivations(rows(0), None))
