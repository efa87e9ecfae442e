"""The connector as vLLM meets it, in this process: refusals, metrics, and what is left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.vllm.conftest import ARCHITECTURES, prompt_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engine_of: object) -> tuple[Any, Any]:
    """The configuration of a server and of its cache, as far as the connector reads them.

    After the engines of other tests: vLLM's import changes classes of transformers.
    """
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    folder = tmp_path_factory.mktemp("parts")
    model = make_tiny_model("llama", folder / "llama", 1, ARCHITECTURES["llama"])
    transfer = Namespace(
        kv_connector_extra_config={"metadata": "http://127.0.0.1:9/metadata"},
        kv_load_failure_policy="fail",
        is_kv_producer=True,
        is_kv_consumer=True,
    )
    config = Namespace(
        parallel_config=Namespace(),
        model_config=Namespace(model=str(model), hf_overrides={}, use_mla=False),
        speculative_config=None,
        kv_transfer_config=transfer,
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    group = Namespace(layer_names=["model.layers.0.attn"], kv_cache_spec=spec)
    return config, Namespace(kv_cache_groups=[group])


@contextmanager
def scheduler(server: tuple[Any, Any]) -> Iterator[Any]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from halfmoon_vllm.connector import HalfmoonConnector

    connector = HalfmoonConnector(server[0], KVConnectorRole.SCHEDULER, server[1])
    try:
        yield connector
    finally:
        connector.shutdown()


def request(name: str, **fields: Any) -> Any:
    defaults = {
        "prompt_token_ids": prompt_of(100),
        "prompt_embeds": None,
        "lora_request": None,
        "mm_features": [],
        "resumable": False,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }
    return Namespace(request_id=name, **{**defaults, **fields})


def test_requests_that_are_more_than_tokens_are_left_out_and_failed_loads_are_computed(
    server: tuple[Any, Any],
) -> None:
    with scheduler(server) as connector:
        assert server[0].kv_transfer_config.kv_load_failure_policy == "recompute"
        assert not connector.requires_kv_delivery
        left_out: list[dict[str, Any]] = [
            {"lora_request": Namespace()},
            {"mm_features": [Namespace()]},
            {"prompt_token_ids": None},
            {"resumable": True},
        ]
        for i, fields in enumerate(left_out):
            connector.on_new_request(request(str(i), **fields))
            assert connector.get_num_new_matched_tokens(request(str(i)), 0) == (0, False)
        connector.on_new_request(request("plain"))
        assert connector.get_num_new_matched_tokens(request("plain"), 0) == (0, False)
        stats = connector.get_kv_connector_stats()
        assert stats.data == {
            "requests_left_out.lora": 1,
            "requests_left_out.multimodal": 1,
            "requests_left_out.not_tokens": 2,
            "blocks_looked_up": 3,
        }
        assert connector.get_kv_connector_stats() is None


def test_counts_are_added_up_and_reach_prometheus(server: tuple[Any, Any]) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from halfmoon_vllm.connector import HalfmoonConnector

    stats = HalfmoonConnector.build_kv_connector_stats({"blocks_stored": 2})
    stats = stats.aggregate(
        HalfmoonConnector.build_kv_connector_stats(
            {"blocks_stored": 1, "blocks_not_stored.staging_full": 4, "of_a_later_release": 1}
        )
    )
    metrics = HalfmoonConnector.build_prom_metrics(
        server[0],
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )
    metrics.observe(stats.data, engine_idx=1)
    found = REGISTRY.get_sample_value("vllm:halfmoon_blocks_stored_total", {"engine": "1"})
    assert found == 3
    labels = {"engine": "1", "reason": "staging_full"}
    assert REGISTRY.get_sample_value("vllm:halfmoon_blocks_not_stored_total", labels) == 4
