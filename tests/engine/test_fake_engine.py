"""The fake engine: its tokens depend on every byte of KV, and on nothing else."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec, parse_fake_spec
from halfmoon_engine.interface import Draw, Run
from halfmoon_models.errors import BadEngineSpec
from halfmoon_protocol.sampling import Sampling

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


def test_bytes_outside_a_sequence_do_not_matter() -> None:
    engine, pool = attached(n_pages=4)
    prompt = list(range(20))
    engine.forward([Run(prompt, 0, [3, 1], None)])
    layout = engine.layout
    for page in (0, 2):
        pool[page * layout.block_bytes : (page + 1) * layout.block_bytes] = (
            layout.block_bytes * b"\xff"
        )
    first = engine.expected(prompt, 1)[0]
    (second,) = engine.forward([Run([first], 20, [3, 1], Draw(GREEDY))])
    assert second == engine.expected(prompt, 2)[1]


def test_blocks_in_each_others_place_change_the_output() -> None:
    engine, _ = attached()
    prompt = list(range(32))
    engine.forward([Run(prompt, 0, [0, 1], None)])
    first = engine.expected(prompt, 1)[0]
    right = engine.forward([Run([first], 32, [0, 1, 2], Draw(GREEDY))])
    wrong = engine.forward([Run([first], 32, [1, 0, 2], Draw(GREEDY))])
    assert right == engine.expected(prompt, 2)[1:]
    assert wrong != right


def test_a_draw_depends_on_seed_position_and_history_only() -> None:
    engine, _ = attached()
    prompt = [5, 6, 7]
    sampling = Sampling(temperature=1.0, seed=3)
    once = engine.expected(prompt, 20, sampling=sampling)
    assert once == engine.expected(prompt, 20, sampling=sampling)
    assert once != engine.expected(prompt, 20, sampling=Sampling(temperature=1.0, seed=4))
    assert once != engine.expected(prompt, 20)
    resumed = engine.expected(prompt + once[:9], 11, sampling=sampling, n_prompt=3)
    assert resumed == once[9:]


def test_models_of_different_seeds_have_different_fingerprints_and_tokens() -> None:
    one, two = FakeEngine(FakeModelSpec(seed=1)), FakeEngine(FakeModelSpec(seed=2))
    assert one.layout.model != two.layout.model
    assert one.expected([1, 2], 8) != two.expected([1, 2], 8)


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


def test_a_step_spreads_its_seconds_over_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    engine = FakeEngine(FakeModelSpec(step_s=0.01, token_s=0.001, layers=4))
    engine.attach(memoryview(bytearray(4 * engine.layout.block_bytes)))
    engine.forward([Run([1] * 30, 0, [0, 1], None)])
    assert slept == pytest.approx([0.01] * 4)
