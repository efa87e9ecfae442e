"""Whole decoders in C++: blocks of rows, chosen rows, hooks, and hostile arguments."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_engine.interface import Draw, Engine, PromptScoring, Run
from halfmoon_engine.load import open_engine
from halfmoon_engine.native.native_batch import native_batch
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Sampling
from tests.engine.driver import Driver, Tiny, open_tiny, prompt_of

native: Any = pytest.importorskip(
    "halfmoon_engine_native", reason="needs the engine's extension: make native"
)

GREEDY = Draw(Sampling(temperature=0.0))


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Engine:
    engine = open_engine(str(tiny("llama")), block_size=16, dtype="float32", native="on", threads=2)
    assert "kernels" in engine.description
    return engine


def scores_of(engine: Engine, tokens: list[int], chunk: int) -> list[float]:
    """Log probabilities of a prompt's tokens, computed in chunks."""
    found: list[float] = []

    def keep(scores: Any) -> None:
        found.extend(score.logprob for score in scores if isinstance(score, TokenScore))

    pages = list(range(engine.layout.blocks_for(len(tokens))))[::-1]
    for start in range(0, len(tokens) - 1, chunk):
        part = tokens[start : start + chunk]
        targets = tokens[start + 1 : start + len(part) + 1]
        engine.forward([Run(part, start, pages, None, scoring=PromptScoring(targets, 0, keep))])
    return found


def test_more_rows_than_a_block_give_what_small_chunks_give(engine: Engine) -> None:
    Driver(engine, 4096)
    tokens = prompt_of(2500)
    whole, parts = scores_of(engine, tokens, 2500), scores_of(engine, tokens, 96)
    assert len(whole) == len(tokens) - 1
    assert whole == pytest.approx(parts, abs=2e-4)


def test_few_wanted_rows_of_the_last_layer_equal_those_of_all_rows(engine: Engine) -> None:
    Driver(engine, 2048)
    tokens = prompt_of(300)
    all_scores = scores_of(engine, tokens, 300)
    found: list[float] = []
    n_pages = engine.layout.blocks_for(300)
    pages, others = list(range(n_pages)), list(range(n_pages, 2 * n_pages))
    scoring = PromptScoring(tokens[1:4], 0, lambda s: found.extend(x.logprob for x in s))
    # Behind another run: the wanted rows are not the first ones.
    wanted = Run(tokens, 0, pages, None, scoring=scoring)
    engine.forward([Run(prompt_of(150), 0, others, None), wanted])
    assert found == pytest.approx(all_scores[:3], abs=2e-4)


def test_another_forward_from_within_a_hook_is_refused(engine: Engine) -> None:
    Driver(engine, 64)

    def again(_: int) -> None:
        engine.forward([Run(prompt_of(16), 0, [1], GREEDY)])

    with pytest.raises(RuntimeError, match="another thread's forward"):
        engine.forward([Run(prompt_of(16), 0, [0], GREEDY)], before_layer=again)


# The binding itself, with arguments that no caller of ours would give.


NORM = ("rms", np.ones(16, np.float32), None, 1e-6)


def small_decoder(n_pairs: int = 4, first_layer: int = 0) -> Any:
    """One layer of width 16, two heads of 8 over one of keys; 32 tokens."""
    dice = np.random.default_rng(7)

    def numbers(*shape: int) -> Any:
        return dice.standard_normal(shape).astype(np.float32)

    def linear(n_out: int, n_in: int, gated: bool = False) -> Any:
        return native.Linear(numbers(n_out, n_in), "float32", n_out, n_in, None, gated)

    embedding = numbers(32, 16)
    decoder = native.Decoder(
        16, 2, 1, 8, n_pairs, embedding, 32, "float32", embedding, 32, "float32", NORM,
        first_layer=first_layer,
    )  # fmt: skip
    decoder.add_layer(
        NORM, linear(32, 16), None, None, 0, 0.35, 0, 0.0, None, linear(16, 16), None, NORM,
        linear(24, 16, gated=True), "silu", linear(16, 12), None,
    )  # fmt: skip
    return decoder


def pool_and_batch(lengths: list[int], starts: list[int]) -> Any:
    pool = native.Pool(bytearray(8 * 2 * 16 * 8 * 4), "float32", 1, 16, 1, 8)
    n = len(lengths)
    pages = np.arange(n, dtype=np.int32)
    return native.Batch(pool, np.array(lengths), np.array(starts), np.ones(n, np.int64), pages)


def set_angles(decoder: Any) -> Any:
    decoder.set_rope(0, np.ones((16, 4), np.float32), np.ones((16, 4), np.float32))
    return decoder


def forward(decoder: Any, batch: Any, row: int = 0, **more: Any) -> None:
    """Compute one row of logits after tokens that are all zero."""
    tokens, logits = np.zeros(batch.n_tokens, np.int64), np.zeros((1, 32), np.float32)
    decoder.forward(batch, tokens, np.array([row]), 1, logits, **more)


def test_a_forward_without_angles_is_refused() -> None:
    with pytest.raises(ValueError, match="angles are set for 0"):
        forward(small_decoder(), pool_and_batch([3], [0]), 2)


def add_layer_of(decoder: Any, norm: Any, linear: Any) -> None:
    """Add a layer all of whose norms and linears are these."""
    decoder.add_layer(
        norm, linear, None, None, -1, 1.0, 0, 0.0, None, linear, None, norm,
        linear, "silu", linear, None,
    )  # fmt: skip


def test_parts_of_other_shapes_are_refused() -> None:
    wrong = native.Linear(np.zeros((8, 8), np.float32), "float32", 8, 8)
    with pytest.raises(ValueError, match="qkv takes 8 numbers and gives 8; 16 and 32 are needed"):
        add_layer_of(small_decoder(), NORM, wrong)
    with pytest.raises(ValueError, match="known are rms, layer"):
        add_layer_of(small_decoder(), ("cube", np.ones(16, np.float32), None, 1e-6), wrong)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(-2, 20), min_size=0, max_size=4),
    start=st.integers(-3, 2**62),
    token=st.integers(-(2**62), 2**62),
    rows=st.lists(st.integers(-3, 60), max_size=5),
    n_rows=st.integers(-2, 6),
    n_angles=st.sampled_from([0, 1, 8, 16, 64]),
    n_logits=st.sampled_from([0, 31, 32, 64, 160]),
)
def test_hostile_forwards_are_refused_or_computed(
    lengths: list[int],
    start: int,
    token: int,
    rows: list[int],
    n_rows: int,
    n_angles: int,
    n_logits: int,
) -> None:
    decoder = small_decoder()
    angles = np.ones((n_angles, 4), np.float32)
    try:
        decoder.set_rope(0, angles, angles)
        batch = pool_and_batch(lengths, [start, 0, 0, 0][: len(lengths)])
        tokens = np.zeros(batch.n_tokens, np.int64)
        if len(tokens):
            tokens[-1] = token
        logits = np.full(n_logits, np.nan, np.float32)
        decoder.forward(batch, tokens, np.array(rows, np.int64), n_rows, logits)
    except (ValueError, TypeError):
        return
    assert n_rows == len(rows) == n_logits // 32
    assert sum(lengths) == 0 or bool(np.isfinite(logits).all())


def test_a_decoder_whose_layers_are_not_in_the_pool_is_refused() -> None:
    pool = native.Pool(bytearray(8 * 2 * 2 * 16 * 4 * 4), "float32", 2, 16, 1, 4)
    batch = native.Batch(pool, np.array([1]), np.array([0]), np.array([1]), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="a pool of 2 layers"):
        forward(set_angles(small_decoder()), batch)
    forward(set_angles(small_decoder()), pool_and_batch([1], [0]))
    with pytest.raises(ValueError, match=r"a pool of 1 layers .* the decoder needs 2"):
        forward(set_angles(small_decoder(first_layer=1)), pool_and_batch([1], [0]))


def test_threads_can_change_between_forwards(engine: Engine) -> None:
    Driver(engine, 512)
    dice, found = random.Random(5), set()
    try:
        for _ in range(12):
            native.set_threads(dice.choice([1, 2, 3, 8]))
            found.add(engine.forward([Run(prompt_of(200), 0, list(range(13)), GREEDY)])[0])
    finally:
        native.set_threads(2)
    assert len(found) == 1


def test_a_decoder_of_a_stage_refuses_what_does_not_fit_it(tiny: Tiny) -> None:
    runners: list[Any] = []
    for index in range(3):
        engine = open_tiny(tiny("llama"), native="on", stage_index=index, n_stages=3)
        engine.attach(memoryview(bytearray(engine.layout.block_bytes)))
        runners.append(engine._runner)
    rows, short = memoryview(bytearray(2 * 256)), memoryview(bytearray(2 * 256 - 4))
    cases: list[tuple[int, int, Any, Any, str]] = [
        (0, 0, None, None, "without head given outgoing"),
        (0, 0, rows, rows, "with an embedding takes no incoming"),
        (0, 1, None, rows, "1 rows of logits are wanted"),
        (1, 0, None, rows, "without embedding takes given incoming"),
        (1, 0, short, rows, "incoming"),
        (1, 0, rows, short, "outgoing"),
        (1, 0, rows, memoryview(bytes(rows)), "outgoing|read-only|writable"),
        (2, 1, rows, rows, "with a head no outgoing"),
    ]
    for stage, n_rows, incoming, outgoing, named in cases:
        runner = runners[stage]
        batch = native_batch(runner._native, runner._pool, [Run([1, 2], 0, [0], None)])
        decoder = runner._decoder
        decoder._compute_angles(2)
        logits = np.empty((n_rows, decoder._packed.shape["n_logits"]), dtype=np.float32)
        with pytest.raises((ValueError, BufferError), match=named):
            decoder._decoder.forward(
                batch, np.array([1, 2]), np.arange(n_rows), n_rows, logits, incoming=incoming,
                outgoing=outgoing,
            )  # fmt: skip
