"""A cluster of a real, if tiny, model: its tokens, and how often its bytes are copied."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, tiny_model: Path) -> Iterator[LiveCluster]:
    fp32 = ["--dtype", "float32", "--block-size", "16"]
    # Landings take memory from the first one on: one of the tests counts copies.
    decode = [*fp32, "--transfer-grants", "off"]
    extra = {"prefill": fp32, "decode": decode}
    with start_cluster(str(tiny_model), n_prefill=2, n_decode=2, n_kvstore=2, extra=extra) as live:
        yield live


def prompt_of(n: int) -> list[int]:
    return [10 + (i * 37) % 300 for i in range(n)]


def bytes_moved(cluster: LiveCluster, **labels: str) -> int:
    """Of all workers."""
    names = [name for name in cluster.cluster.processes if not name.startswith("conductor")]
    metric = "halfmoon_transfer_bytes_total"
    return sum(int(cluster.metrics(name, **labels).get(metric, 0)) for name in names)


@pytest.mark.parametrize("n_tokens", [1, 17, 3000])
def test_greedy_tokens_are_those_of_transformers_cold_and_cached(
    cluster: LiveCluster, alone: Any, n_tokens: int
) -> None:
    prompt = prompt_of(n_tokens)
    expected = alone.generate(prompt, 24)
    for _ in range(2):
        assert cluster.ask(prompt, 24)[0] == expected


def test_a_prompt_on_one_host_is_copied_once_to_decode_and_once_to_its_kvstore(
    cluster: LiveCluster, tiny_model: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    width = config.num_key_value_heads * config.head_dim
    block_bytes = config.num_hidden_layers * 2 * 16 * width * 4  # keys and values in float32
    copies = {"path": "shm", "op": "write"}
    before = bytes_moved(cluster), bytes_moved(cluster, **copies)
    prompt = [11, *prompt_of(299)]  # 18 whole blocks and a part of one, none of them cached
    cluster.complete(prompt=prompt, max_tokens=1, temperature=0)
    n_bytes = (19 + 18) * block_bytes
    cluster.until(lambda: bytes_moved(cluster) - before[0] >= n_bytes)
    assert bytes_moved(cluster) - before[0] == n_bytes
    assert bytes_moved(cluster, **copies) - before[1] == n_bytes
