"""Conversations with real processes: each turn reads what is kept of those before it."""

import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e

BLOCK = 16
N_NEW = 40
FP32 = ["--dtype", "float32", "--block-size", str(BLOCK)]


def message_of(turn: int) -> list[int]:
    return [10 + (i * 37 + turn * 101) % 300 for i in range(21 + 9 * turn)]


@pytest.fixture(scope="module")
def block_bytes(tiny_model: Path) -> int:
    config = AutoConfig.from_pretrained(tiny_model)
    width = config.num_key_value_heads * config.head_dim
    return int(config.num_hidden_layers * 2 * BLOCK * width * 4)  # keys and values in float32


def landing_bytes(cluster: LiveCluster, source: str) -> int:
    """Bytes of landings that were sent by prefill processes, or held by decode before."""
    names = [name for name in cluster.cluster.processes if name.startswith("prefill")]
    metric = "halfmoon_prefill_landing_bytes_total"
    return sum(int(cluster.metrics(name, source=source).get(metric, 0)) for name in names)


def converse(cluster: LiveCluster, alone: Any, n_turns: int) -> list[tuple[int, int, int, int]]:
    """Have a conversation; of each turn: bytes sent and held, tokens cached and those before it."""
    said: list[int] = []
    seen: list[tuple[int, int, int, int]] = []
    for turn in range(n_turns):
        before = [landing_bytes(cluster, source) for source in ("sent", "held")]
        prompt = [*said, *message_of(turn)]
        answer, n_cached = cluster.ask(prompt, N_NEW)
        assert answer == alone.generate(prompt, N_NEW)
        # Prefill has counted the prompt, of which it sends one block at the least.
        cluster.until(lambda n=before[0]: landing_bytes(cluster, "sent") > n)
        now = [landing_bytes(cluster, source) for source in ("sent", "held")]
        seen.append((now[0] - before[0], now[1] - before[1], n_cached, len(said)))
        said = [*prompt, *answer]
        n_whole = (len(said) - 1) // BLOCK
        cluster.until(lambda n=n_whole: cluster.n_indexed() >= n)
    return seen


def test_each_turn_reads_the_answers_before_it_and_sends_what_decode_does_not_have(
    start_cluster: StartCluster, tiny_model: Path, alone: Any, block_bytes: int
) -> None:
    extra = {"prefill": FP32, "decode": FP32}
    with start_cluster(str(tiny_model), n_prefill=2, extra=extra) as cluster:
        turns = converse(cluster, alone, 5)
        for turn, (sent, held, n_cached, n_before) in enumerate(turns):
            n_blocks = -(-(n_before + len(message_of(turn))) // BLOCK)
            n_held = max(0, n_before - 1) // BLOCK  # the last token was never run
            assert (sent, held) == ((n_blocks - n_held) * block_bytes, n_held * block_bytes)
            assert n_cached == n_held * BLOCK


def test_a_pool_too_small_for_a_conversation_costs_no_token(
    start_cluster: StartCluster, tiny_model: Path, alone: Any, block_bytes: int
) -> None:
    """Pages for one request of its last turn: others between two turns take them."""
    n_pages = 26
    mib = str(-(-n_pages * block_bytes // (1 << 20)))
    extra = {"prefill": FP32, "decode": [*FP32, "--pool-mib", mib]}
    with start_cluster(str(tiny_model), extra=extra) as cluster:
        first = converse(cluster, alone, 3)
        assert all(held for _, held, _, n_before in first if n_before)
        n_tokens = (int(mib) << 20) // block_bytes * BLOCK - N_NEW
        other = [5 + (i * 31) % 300 for i in range(n_tokens)]
        assert cluster.ask(other, N_NEW)[0] == alone.generate(other, N_NEW)
        again = converse(cluster, alone, 3)
        assert again[0][1] == 0, "the first turn is still there: the pool is too large"
        assert [turn[1] for turn in again[1:]] == [turn[1] for turn in first[1:]]


def test_a_kvstore_that_hangs_and_ends_under_answers_costs_no_token(
    start_cluster: StartCluster,
) -> None:
    engine = FakeEngine(parse_fake_spec("fake://slow"), block_size=BLOCK)
    extra = {role: ["--block-size", str(BLOCK)] for role in ("decode", "prefill")}
    with start_cluster("fake://slow?step_s=0.02", extra=extra) as cluster:
        cluster.ask(message_of(1), N_NEW)
        cluster.until(lambda: cluster.n_indexed() >= 3)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            cluster.process("kvstore-0").signal(number)
            for turn in (1, 2, 3):
                prompt = message_of(turn)
                assert cluster.ask(prompt, N_NEW)[0] == engine.expected(prompt, N_NEW)
