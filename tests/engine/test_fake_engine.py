"""The fake engine: its tokens depend on every byte of KV, on nothing else, and not on torch.

Fakes of all stages compute together what one fake engine of all layers computes.
"""

import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_engine.errors import BadEngineStage
from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec, parse_fake_spec
from halfmoon_engine.interface import Draw, Run, StageActivations
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import BadEngineSpec
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.models.llama_folders import make_llama
from tests.engine.chained_engine import ChainedEngine

GREEDY = Sampling(temperature=0.0)


def attached(block_size: int = 16, n_pages: int = 64) -> tuple[FakeEngine, bytearray]:
    engine = FakeEngine(FakeModelSpec(max_context=512), block_size=block_size)
    pool = bytearray(n_pages * engine.layout.block_bytes)
    engine.attach(memoryview(pool))
    return engine, pool


def generate(
    engine: FakeEngine,
    prompt: Sequence[int],
    n: int,
    pages: Sequence[int],
    chunks: Sequence[int],
    sampling: Sampling = GREEDY,
) -> list[int]:
    """Prefill in the given chunks, then decode until `n` tokens are out."""
    tokens, start = list(prompt), 0
    for size in chunks:
        last = start + size == len(prompt)
        draw = Draw(sampling, tuple(tokens), len(prompt)) if last else None
        (token,) = engine.forward([Run(prompt[start : start + size], start, pages, draw)])
        start += size
    assert isinstance(token, int)
    tokens.append(token)
    while len(tokens) < len(prompt) + n:
        draw = Draw(sampling, tuple(tokens), len(prompt))
        (token,) = engine.forward([Run(tokens[-1:], len(tokens) - 1, pages, draw)])
        assert isinstance(token, int)
        tokens.append(token)
    return tokens[len(prompt) :]


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=90),
    cuts=st.lists(st.integers(1, 89), max_size=4),
    block_size=st.sampled_from([16, 17, 512]),
    seed=st.integers(0, 2**16),
    temperature=st.sampled_from([0.0, 0.7]),
    presence=st.sampled_from([0.0, 0.5]),
)
def test_output_is_the_oracles_whatever_the_chunks_pages_and_blocks(
    prompt: list[int],
    cuts: list[int],
    block_size: int,
    seed: int,
    temperature: float,
    presence: float,
) -> None:
    engine, _ = attached(block_size, n_pages=32)
    edges = sorted({0, len(prompt), *(cut for cut in cuts if cut < len(prompt))})
    chunks = [b - a for a, b in pairwise(edges)]
    pages = random.Random(seed).sample(range(32), engine.layout.blocks_for(len(prompt) + 8))
    sampling = Sampling(temperature=temperature, presence_penalty=presence, seed=seed)
    produced = generate(engine, prompt, 8, pages, chunks, sampling)
    assert produced == engine.expected(prompt, 8, sampling=sampling)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changed_byte_of_a_sequences_kv_changes_its_next_token(data: st.DataObject) -> None:
    # The vocabulary is all of 2^32, so that two digests share a token only by a rare chance.
    engine = FakeEngine(FakeModelSpec(max_context=128, vocab=2**32), block_size=16)
    layout = engine.layout
    pool = bytearray(4 * layout.block_bytes)
    engine.attach(memoryview(pool))
    prompt, pages = list(range(40)), [2, 0, 3]
    first = engine.expected(prompt, 1)[0]
    engine.forward([Run(prompt, 0, pages, None)])
    step = Run([first], 40, pages, Draw(GREEDY))
    (good,) = engine.forward([step])

    position = data.draw(st.integers(0, 39), "position")
    layer = data.draw(st.integers(0, layout.n_layers - 1), "layer")
    side = data.draw(st.integers(0, 1), "key or value")
    row_bytes = layout.layer_bytes // 2 // 16
    offset = (
        pages[position // 16] * layout.block_bytes
        + layer * layout.layer_bytes
        + side * 16 * row_bytes
        + position % 16 * row_bytes
        + data.draw(st.integers(0, row_bytes - 1), "byte of the row")
    )
    pool[offset] ^= data.draw(st.integers(1, 255), "flipped bits")
    (bad,) = engine.forward([step])
    assert good == engine.expected(prompt, 2)[1]
    assert bad != good


def test_blocks_in_each_others_place_change_the_output() -> None:
    engine, _ = attached()
    prompt = list(range(32))
    engine.forward([Run(prompt, 0, [0, 1], None)])
    first = engine.expected(prompt, 1)[0]
    right = engine.forward([Run([first], 32, [0, 1, 2], Draw(GREEDY))])
    wrong = engine.forward([Run([first], 32, [1, 0, 2], Draw(GREEDY))])
    assert right == engine.expected(prompt, 2)[1:]
    assert wrong != right


def test_a_spec_names_every_field() -> None:
    model = parse_fake_spec(
        "fake://tiny?layers=2&kv_heads=1&head_dim=4&vocab=50&step_s=0.5&token_s=1e-5"
        "&max_context=99&seed=7&eos=3&dtype=bfloat16"
    )
    assert model == FakeModelSpec(
        name="tiny", layers=2, kv_heads=1, head_dim=4, vocab=50, step_s=0.5, token_s=1e-5,
        max_context=99, seed=7, eos=3, dtype="bfloat16",
    )  # fmt: skip
    assert parse_fake_spec("fake://tiny?name=other").name == "other"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("fake://tiny?layer=2", "layer"),
        ("fake://tiny?layers=two", "layers"),
        ("fake://tiny?layers=0", "at least 1"),
        ("fake://tiny?head_dim=3&kv_heads=1", "12 bytes"),
        ("http://tiny", "fake://"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec: str, named: str) -> None:
    with pytest.raises(BadEngineSpec, match=named):
        parse_fake_spec(spec)


WITHOUT_LIBRARIES = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None
import halfmoon_engine, halfmoon_engine.interface, halfmoon_engine.fake_engine
import halfmoon_testing.models.tiny_models
from halfmoon_models.errors import UnsupportedModel
from halfmoon_engine.load import open_engine
engine = open_engine("fake://tiny?vocab=7", block_size=16, served_name="moon")
assert engine.name == "moon" and engine.layout.block_size == 16
try: open_engine(sys.argv[1], block_size=16)
except UnsupportedModel as error: print(error)
"""


def test_a_fake_engine_and_a_refusal_need_no_torch(tmp_path: Path) -> None:
    make_llama(tmp_path, quantization_config={"quant_method": "awq"})
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "AWQ" in done.stdout


DRAW = Draw(Sampling(temperature=0.0))
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
        draw = DRAW if end == len(prompt) else None
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
        draw = DRAW if end == 40 else None
        run = Run(prompt[start:end], start, pages, draw)
        (token,) = last.forward([run], activations=StageActivations(rows, None))
    assert token == FakeEngine(MODEL).expected(prompt, 1)[0]
    at = data.draw(st.integers(0, len(between) - 1), "byte")
    between[at] ^= data.draw(st.integers(1, 255), "flipped bits")
    (changed,) = last.forward([run], activations=StageActivations(memoryview(between), None))
    assert changed != token


def test_a_stage_takes_its_share_of_the_simulated_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    engine = FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.001, layers=4), n_stages=2)
    assert engine.stage.n_layers == 1
    engine.attach(memoryview(bytearray(4 * engine.layout.block_bytes)))
    rows = memoryview(bytearray(30 * engine.stage.activation_bytes))
    engine.forward([Run([1] * 30, 0, [0, 1], None)], activations=StageActivations(None, rows))
    assert slept == pytest.approx([0.01])


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
        (
            0,
            DRAW,
            StageActivations(None, rows(48)),
            "run 0 wants a token.*of stage 0.*stage 2",
        ),
        (0, None, None, "stage 0 of 3 needs outgoing activations of 48 bytes, none"),
        (0, None, StageActivations(rows(48), rows(48)), "stage 0 of 3 has no incoming"),
        (1, None, StageActivations(None, rows(48)), "stage 1 of 3 needs incoming"),
        (1, None, StageActivations(rows(47), rows(48)), "48 contiguous bytes of incoming.*47 were"),
        (1, None, StageActivations(rows(48), rows(96)), "48 contiguous bytes of outgoing.*96 were"),
        (1, None, StageActivations(rows(48), rows(96)[::2]), "contiguous bytes of outgoing"),
        (1, None, StageActivations(rows(48), rows(48, readonly=True)), "read-only"),
        (2, DRAW, StageActivations(rows(48), rows(48)), "stage 2 of 3 has no outgoing"),
    ],
)
def test_activations_that_do_not_fit_are_refused_by_name(
    index: int, draw: Draw | None, activations: StageActivations | None, named: str
) -> None:
    engine = FakeEngine(MODEL, stage_index=index, n_stages=3)
    engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
    with pytest.raises(ValueError, match=named):
        engine.forward([Run([1, 2, 3], 0, [0], draw)], activations=activations)
