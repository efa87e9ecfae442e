"""Workers in TypeScript beside ours: answers, log probabilities and cached tokens are the same."""

import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halfmoon_cli.up.embedded_cluster import ClusterPlan
from halfmoon_engine import demo
from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.redis_server import RedisServer
from tests.installed_programs import needs_programs
from tests.polyglot.conftest import StartMixed, mixed_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK = 16
N_NEW = 24
FLAGS = ["--block-size", str(BLOCK)]
EXTRA = {"prefill": [*FLAGS, "--home-kvstore", "kvstore-0"], "decode": FLAGS}
KVSTORE = {"kvstore-0": ["--capacity-mib", "64"]}
DECODE = ["--model", str(demo.FOLDER), "--block-size", str(BLOCK), "--capacity-mib", "64"]


def prompt_of(turn: int) -> list[int]:
    return [10 + (i * 37 + turn * 101) % 300 for i in range(50 + 9 * turn)]


def conversation(cluster: Any, *, keeps_answers: bool = True) -> list[tuple[Any, ...]]:
    """Return token ids, log probabilities and cached tokens of turns that build on each other."""
    said: list[int] = []
    turns = []
    for turn in range(3):
        prompt = [*said, *prompt_of(turn)]
        answer = cluster.complete(
            prompt=prompt,
            max_tokens=N_NEW,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            logprobs=3,
        )
        choice = answer["choices"][0]
        tokens = list(choice["token_ids"])
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        logprobs = [round(p, 4) for p in choice["logprobs"]["token_logprobs"]]
        turns.append((tokens, logprobs, cached))
        said = [*prompt, *tokens]
        n_kept = len(said) - 1 if keeps_answers else len(prompt)
        cluster.until(partial(knows, cluster, n_kept // BLOCK))
    return turns


def knows(cluster: Any, n_blocks: int) -> bool:
    return bool(cluster.n_indexed() == n_blocks)


@pytest.fixture(scope="module")
def wanted(program: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The conversation with workers of ours alone."""
    plan = ClusterPlan(str(demo.FOLDER), free_port(), extra=EXTRA)
    with mixed_cluster(tmp_path_factory.mktemp("ours"), program, {}, plan) as cluster:
        turns = conversation(cluster)
    assert [cached for *_, cached in turns] == [0, 64, 144]
    return turns


@needs_programs("redis-server")
def test_a_kvstore_in_typescript_behind_a_key_in_redis_gives_the_same_answers_and_cached_tokens(
    start_mixed: StartMixed, wanted: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    redis = RedisServer(tmp_path)
    try:
        with start_mixed(
            str(demo.FOLDER),
            KVSTORE,
            n_kvstore=0,
            extra=EXTRA,
            metadata=redis.url,
            environment={"HALFMOON_CLUSTER_KEY": "the moon is made of green cheese"},
        ) as cluster:
            assert conversation(cluster) == wanted
    finally:
        redis.kill()


def test_a_decode_worker_in_typescript_gives_the_same_answers(
    start_mixed: StartMixed, wanted: list[tuple[Any, ...]]
) -> None:
    nodes = {"decode-0": DECODE}
    with start_mixed(str(demo.FOLDER), nodes, n_decode=0, extra=EXTRA) as cluster:
        got = conversation(cluster, keeps_answers=False)
        assert [turn[:2] for turn in got] == [turn[:2] for turn in wanted]


PLAYERS = 4
N_LONG = 1000


def ask(player: int) -> dict[str, Any]:
    """Return what to ask: two greedy answers, and two that a seed draws."""
    drawn = {"temperature": 1.0, "top_p": 0.95, "top_k": 300, "presence_penalty": 0.5}
    return {
        "prompt": prompt_of(player),
        "max_tokens": N_LONG,
        "ignore_eos": True,
        "return_token_ids": True,
        **({"temperature": 0} if player % 2 else {**drawn, "seed": 7 + player}),
    }


def test_a_decode_worker_in_typescript_that_is_killed_costs_no_token(
    start_mixed: StartMixed,
) -> None:
    nodes = {"decode-1": DECODE}
    # By its assumed costs, ours is the slower one while there is little to do.
    extra = {"prefill": EXTRA["prefill"], "decode": [*FLAGS, "--no-measure"]}
    with start_mixed(str(demo.FOLDER), nodes, n_decode=1, extra=extra) as cluster:
        streamed: list[list[int]] = [[] for _ in range(PLAYERS)]

        def play(player: int) -> None:
            for event in cluster.events(**ask(player)):
                for choice in event.get("choices") or ():
                    streamed[player] += choice.get("token_ids") or []

        def is_under_way() -> bool:
            load = cluster.workers()["decode-1"]["load"]
            return load["n_running"] > 0 and all(len(tokens) > 5 for tokens in streamed)

        with ThreadPoolExecutor(PLAYERS) as players:
            playing = [players.submit(play, player) for player in range(PLAYERS)]
            cluster.until(is_under_way, within_s=30)
            cluster.nodes["decode-1"].stop(signal.SIGKILL)
            assert any(len(tokens) < N_LONG for tokens in streamed)
            for each in playing:
                each.result()
        cluster.until(lambda: "decode-1" not in cluster.live())
        for player, tokens in enumerate(streamed):
            wanted = cluster.complete(**ask(player))["choices"][0]["token_ids"]
            assert tokens == wanted
            assert len(tokens) == N_LONG
