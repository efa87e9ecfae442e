"""Load a cluster steadily with checked requests, while its processes are restarted in turn."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from random import Random

import httpx

from halfmoon_engine.fake_engine import FakeEngine
from tests.e2e.conftest import LiveCluster

#: What is restarted together: while one of two workers is away, the other one serves.
TURNS = (("kvstore-0",), ("prefill-0", "decode-0"), ("prefill-1", "decode-1"), ("conductor-0",))
N_CLIENTS = 3
N_NEW = 24


class Load:
    """Clients that send one request after another, and check each answer."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._ended, self._away = threading.Event(), threading.Event()
        self._oracle = FakeEngine()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"client {i}", daemon=True)
            for i in range(N_CLIENTS)
        ]
        self.n_right = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    @property
    def all_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    @contextmanager
    def without_conductor(self) -> Iterator[None]:
        """Let clients repeat requests that the conductor refuses meanwhile."""
        self._away.set()
        yield
        self._away.clear()

    def _run(self, number: int) -> None:
        dice = Random(number)
        while not self._ended.is_set():
            # Half of a prompt is one of four, so that blocks of kvstores are read.
            start = dice.randrange(4) * 101
            prompt = [(start + i * 37) % 300 for i in range(128)]
            prompt += [dice.randrange(300) for _ in range(dice.randrange(1, 128))]
            fault = self._check_answer(prompt)
            with self._lock:
                self.n_right += not fault
                self.faults += [fault] * bool(fault)

    def _check_answer(self, prompt: list[int]) -> str:
        """Send one request until it is answered; return what is wrong with the answer."""
        body = {
            "model": "moon",
            "prompt": prompt,
            "max_tokens": N_NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        while True:
            was_away = self._away.is_set()
            try:
                answer = httpx.post(self._url, json=body, timeout=60, trust_env=False)
            except httpx.TransportError as error:
                status, said = 503, repr(error)
            else:
                status, said = answer.status_code, answer.text
            if status == 200:
                tokens = answer.json()["choices"][0]["token_ids"]
                return "" if tokens == self._oracle.expected(prompt, N_NEW) else said
            if status != 503 or not (was_away or self._away.is_set()):
                return f"{status}: {said}"
            time.sleep(0.05)


def restart(
    cluster: LiveCluster, names: tuple[str, ...], by: signal.Signals = signal.SIGTERM
) -> None:
    """End these processes, start them again, and wait until the conductor uses all workers."""
    for name in names:
        cluster.process(name).signal(by)
    for name in names:
        assert cluster.process(name).wait(90), f"{name} has not ended\n{cluster.last_words()}"
        assert cluster.process(name).exit_code == (0 if by is signal.SIGTERM else -by)
    if names != ("conductor-0",):
        cluster.until(lambda: not set(names) & set(cluster.live()))
    cluster.restart(*names)
    cluster.until(cluster.cluster.ready)
    assert not cluster.cluster.dead(), cluster.logs()


def restart_in_turn(
    cluster: LiveCluster,
    load: Load,
    *,
    by: Callable[[tuple[str, ...]], signal.Signals] = lambda _: signal.SIGTERM,
    after_turn: Callable[[int], None] = lambda _: None,
) -> None:
    """Restart all processes, and check after each turn that old and new ones serve together.

    Args:
        cluster: with the processes of `TURNS`.
        load: sends requests meanwhile.
        by: how those of a turn are ended, which it may wait to do.
        after_turn: a further check after each turn, which gets the turn's number.
    """
    for number, names in enumerate(TURNS):
        n_right = load.n_right
        is_conductor = names == ("conductor-0",)
        with load.without_conductor() if is_conductor else nullcontext():
            restart(cluster, names, by(names))
        # All kinds of connections between old and new processes are used.
        cluster.until(lambda n=n_right: load.n_right >= n + 2 * N_CLIENTS)
        after_turn(number)
        assert not load.faults
