"""A group of prefill workers as real processes: activations over shared memory, ZeroMQ between.

tests/services/test_groups.py has losses of members, and members with the layers of one stage.
"""

from pathlib import Path

import pytest

from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.e2e.conftest import StartCluster
from tests.e2e.transformers_alone import Transformers

pytestmark = pytest.mark.e2e

FP32 = ["--dtype", "float32", "--block-size", "16"]


def prompt_of(n: int, first: int) -> list[int]:
    return [first, *(10 + (i * 37) % 300 for i in range(n - 1))]


def test_long_prompts_are_computed_in_stages_cold_and_cached(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    model = make_tiny_model("qwen3", tmp_path / "six", fields={"num_hidden_layers": 6})
    whole = Transformers(model)
    extra = {"prefill": [*FP32, "--group-chunk-tokens=64", "--no-measure"], "decode": FP32}
    extra["conductor"] = ["--group-least-gain=1"]  # whatever a busy machine makes of predictions
    with start_cluster(str(model), n_prefill=2, group_size=2, extra=extra) as cluster:

        def require(prompt: list[int]) -> None:
            assert cluster.ask(prompt, 12)[0] == whole.generate(prompt, 12)

        def n_shares() -> float:
            """How many shares of prompts the last stage has computed."""
            return cluster.metrics("prefill-1").get("halfmoon_prefill_shares_total", 0)

        for n_tokens in (500, 1000):
            prompt = prompt_of(n_tokens, 7)
            before = n_shares()
            require(prompt)
            assert n_shares() > before
            require(prompt)
            require([*prompt, *prompt_of(400, 8)])  # its cached prefix is read by each stage
