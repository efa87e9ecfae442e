"""One bad event under load costs no stream: a full or emptied Redis, a rack, a frozen conductor."""

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis as redis_client

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from tests.e2e.conftest import LiveCluster, StartCluster
from tests.e2e.redis_server import RedisServer
from tests.installed_programs import needs_programs

pytestmark = [pytest.mark.e2e, needs_programs("redis-server")]

MODEL = "fake://tiny?step_s=0.05"
N_STREAMS = 6


def fill(client: "redis_client.Redis") -> None:
    """Leave no room for anything new, as ``noeviction`` does."""
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + 2**20)
    n = 0
    for size in (2**16, 1000, 100):
        with pytest.raises(redis_client.exceptions.OutOfMemoryError):
            while True:
                n += 1
                client.set(f"others/{n}", bytes(size))


def redis_is_full(cluster: LiveCluster, client: "redis_client.Redis") -> None:
    fill(client)


def redis_is_flushed(cluster: LiveCluster, client: "redis_client.Redis") -> None:
    client.flushall()


def conductor_stands_still(
    seconds: float,
) -> Callable[[LiveCluster, "redis_client.Redis"], None]:
    """Make a fault that is longer than heartbeats."""

    def stand_still(cluster: LiveCluster, client: "redis_client.Redis") -> None:
        conductor = cluster.process("conductor-0")
        conductor.signal(signal.SIGSTOP)
        time.sleep(seconds)  # the fault itself
        conductor.signal(signal.SIGCONT)

    stand_still.__name__ = f"the_conductor_stands_still_for_{seconds:.0f}_s"
    return stand_still


def a_rack_dies(cluster: LiveCluster, client: "redis_client.Redis") -> None:
    for name in ("decode-0", "prefill-0", "kvstore-0"):
        cluster.process(name).signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "happens",
    [
        redis_is_full,
        redis_is_flushed,
        conductor_stands_still(6.0),
        pytest.param(
            conductor_stands_still(20.0),
            marks=pytest.mark.nightly("a conductor may stand still for two leases under streams"),
        ),
        a_rack_dies,
    ],
    ids=lambda happens: happens.__name__,
)
def test_no_stream_is_lost(
    start_cluster: StartCluster,
    redis: RedisServer,
    happens: Callable[[LiveCluster, "redis_client.Redis"], None],
) -> None:
    no_stream_is_lost(start_cluster, redis, happens, n_new=240)


@pytest.mark.nightly("any two or three processes of different roles may die at once, fifty times")
@pytest.mark.parametrize("n", range(50))
def test_processes_of_different_roles_that_die_at_once_cost_no_stream(
    start_cluster: StartCluster, redis: RedisServer, n: int
) -> None:
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    roles = dice.sample(("prefill", "decode", "kvstore", "redis"), dice.choice((2, 3)))
    pause_s = dice.choice((0.0, 0.1, 0.5))
    print(f"{n}: seed {seed}: {roles} within {pause_s} s each")

    def die(cluster: LiveCluster, client: "redis_client.Redis") -> None:
        for role in roles:
            if role == "redis":
                redis.kill()
                redis.start()
            else:
                cluster.process(f"{role}-{dice.randrange(2)}").signal(signal.SIGKILL)
            time.sleep(dice.random() * pause_s)  # the fault itself

    no_stream_is_lost(start_cluster, redis, die, n_new=100)


def no_stream_is_lost(
    start_cluster: StartCluster,
    redis: RedisServer,
    happens: Callable[[LiveCluster, "redis_client.Redis"], None],
    n_new: int,
) -> None:
    """Let something happen under streams, and compare every answer; print the longest pause."""
    oracle = FakeEngine(parse_fake_spec(MODEL))
    client = redis_client.Redis.from_url(redis.url)
    with (
        start_cluster(MODEL, n_prefill=2, n_decode=2, n_kvstore=2, metadata=redis.url) as cluster,
        ThreadPoolExecutor(N_STREAMS) as clients,
    ):
        begun = [threading.Event() for _ in range(N_STREAMS)]
        pauses_s = list[float]()

        def ask(number: int) -> list[int]:
            last_s = time.monotonic()

            def note(n_tokens: int) -> None:
                nonlocal last_s
                pauses_s.append(time.monotonic() - last_s)
                last_s += pauses_s[-1]
                if n_tokens > 2:
                    begun[number].set()

            return cluster.stream(prompt_of(number), n_new, note)

        answers = [clients.submit(ask, number) for number in range(N_STREAMS)]
        assert all(each.wait(60) for each in begun)
        happens(cluster, client)
        # Short requests beside them, and one after the other.
        for number in range(5):
            assert cluster.ask([9, number, 7], 3)[0] == oracle.expected([9, number, 7], 3)
        for number, answer in enumerate(answers):
            assert answer.result() == oracle.expected(prompt_of(number), n_new)
        print(f"longest pause of a stream: {max(pauses_s):.1f} s")
    client.close()


def prompt_of(number: int) -> list[int]:
    return [(number * 31 + i) % 900 for i in range(40)]


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_all_services_stop_in_order_while_the_metadata_server_does_not_answer(
    start_cluster: StartCluster, redis: RedisServer, how: str
) -> None:
    with start_cluster("fake://tiny", metadata=redis.url) as cluster:
        if how == "killed":
            redis.kill()
        else:
            redis.freeze()
        for process in cluster.cluster.processes.values():
            process.signal(signal.SIGTERM)
        for name, process in cluster.cluster.processes.items():
            assert process.wait(60), f"{name} has not ended\n{cluster.last_words()}"
            assert process.exit_code == 0, cluster.logs()
