"""Two stock vLLM servers share the pool: hits, the same tokens, salts, metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster
from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.conftest import READY_WITHIN_S, LiveCluster
from tests.vllm.conftest import BLOCK_SIZE, prompt_of
from tests.vllm.connector_fleet import Fleet, cached_tokens, wait_until
from tests.vllm.mixed_cluster import TORCH, VLLM, complete


def test_a_prompt_of_one_server_is_a_hit_at_the_other_with_the_same_tokens(fleet: Fleet) -> None:
    first, second = fleet.servers[:2]
    prompt = prompt_of(200, seed=1)
    expected = fleet.stored(first, prompt)
    answer = second.complete(prompt, 8)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert second.metric("vllm:external_prefix_cache_hits_total") >= 192
    # What was loaded is right: a prompt that goes on behind it continues the same way.
    longer = [*prompt, *expected]
    assert second.tokens(longer, 8) == first.tokens(longer, 8)


def test_hits_of_salted_requests_are_only_within_their_salt(fleet: Fleet) -> None:
    first, second = fleet.servers[:2]
    prompt = prompt_of(200, seed=2)
    expected = fleet.stored(first, prompt, cache_salt="ours")
    assert cached_tokens(second, prompt, cache_salt="theirs") == 0
    assert cached_tokens(second, prompt) == 0
    answer = second.complete(prompt, 8, cache_salt="ours")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert answer["choices"][0]["token_ids"] == expected


def test_a_worker_of_halfmoon_with_vllm_shares_these_blocks(fleet: Fleet, tmp_path: Path) -> None:
    first, second = fleet.servers[:2]
    with halfmoon_beside(fleet, tmp_path) as cluster:
        theirs, ours = prompt_of(200, seed=5), prompt_of(200, seed=6)
        expected = fleet.stored(first, theirs)
        answer = complete(cluster, theirs, 8)
        assert answer["token_ids"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        before = fleet.pool.n_stored("kvstore-0")
        expected = complete(cluster, ours, 8)["token_ids"]
        wait_until(lambda: fleet.pool.n_stored("kvstore-0") >= before + 6, "blocks are stored")
        assert cached_tokens(second, ours) == 192
        assert second.tokens(ours, 8) == expected
        # Salts mean the same to the Conductor and to a server.
        salted = prompt_of(200, seed=7)
        expected = fleet.stored(first, salted, cache_salt="ours")
        answer = complete(cluster, salted, 8, cache_salt="ours")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        assert answer["token_ids"] == expected


@contextmanager
def halfmoon_beside(fleet: Fleet, folder: Path) -> Iterator[LiveCluster]:
    """A conductor, a prefill worker with vLLM and a decode worker, over the fleet's pool."""
    flags = (f"--block-size={BLOCK_SIZE}", "--dtype=float32", "--pool-mib=16", "--measure=false")
    plan = ClusterPlan(
        model=str(fleet.model),
        http_port=free_port(),
        n_kvstore=0,
        threads={"prefill": 1, "decode": 1},
        metadata=fleet.pool.metadata_url,
        extra={"prefill": (*flags, *VLLM), "decode": (*flags, *TORCH)},
    )
    with EmbeddedCluster(plan, folder) as cluster:
        live = LiveCluster(cluster)

        def ready() -> bool:
            assert not cluster.dead(), live.logs()
            return cluster.ready()

        live.until(ready, READY_WITHIN_S)
        live.until(lambda: len(live.live()) == 3)
        yield live
