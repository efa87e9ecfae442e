"""A group of prefill workers as real processes: activations over shared memory, ZeroMQ between."""

from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec

SPEC = "fake://tiny?layers=6"
PROMPT = [(i * 7) % 990 for i in range(900)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_long_prompt_is_computed_in_stages_by_processes(
    start_cluster: Callable[..., Any], size: int
) -> None:
    options = {
        "prefill": ["--group-chunk-tokens=64", "--no-measure"],
    }
    with start_cluster(SPEC, n_prefill=size, group_size=size, extra=options) as cluster:
        cluster.until(lambda: len(cluster.live()) == size + 2)
        asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        oracle = FakeEngine(parse_fake_spec(SPEC), block_size=64)
        for _ in range(2):  # the second time with a cached prefix
            (choice,) = cluster.complete(**asked)["choices"]
            assert choice["token_ids"] == oracle.expected(PROMPT, 6)
        assert any(
            f"prefill-{size - 1}" in str(decision.get("chosen")) or "group-0" in str(decision)
            for decision in cluster.decisions()
        )
