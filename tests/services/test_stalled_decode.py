"""A decode worker whose forward pass never ends, and which goes on answering heartbeats."""

import threading
from typing import Any

import pytest

from halfmoon_conductor.errors import ApiError
from halfmoon_conductor.workers import worker_links
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import RequestId
from tests.services.conftest import LocalCluster, open_cluster

PROMPT = list(range(40))
N_NEW = 30


class HangingEngine(FakeEngine):
    """An engine whose pass number `hangs_at` ends when the test does."""

    go_on: threading.Event
    hangs_at = 0
    _n_passes = 0

    def forward(self, *arguments: Any, **more: Any) -> Any:
        self._n_passes += 1
        if self._n_passes == self.hangs_at:
            self.go_on.wait(300)
        return super().forward(*arguments, **more)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(worker_links, "_LOOK_S", 0.05)
    made: list[HangingEngine] = []
    go_on = threading.Event()

    def make() -> HangingEngine:
        engine = HangingEngine()
        engine.go_on = go_on
        made.append(engine)
        return engine

    yield made, make
    go_on.set()


def hang(cluster: LocalCluster, name: str, n_more: int) -> None:
    engine = cluster.members[name].engine
    assert isinstance(engine, HangingEngine)
    engine.hangs_at = engine._n_passes + n_more


async def test_its_requests_go_on_elsewhere_and_no_token_is_lost_or_repeated(engines: Any) -> None:
    made, make = engines
    async with open_cluster(make, n_decode=2) as cluster:
        expected = await cluster.generate(PROMPT, N_NEW)
        cluster.hub.decode_stall_s = 1.0
        tokens: list[int] = []
        hung = ""
        async for event in cluster.events(PROMPT, N_NEW):
            tokens.append(event.token)
            if len(tokens) == 5:
                hung = str(cluster.core.decodes_at(RequestId("cmpl-2")))
                hang(cluster, hung, 3)
        assert tokens == expected
        assert any(engine.hangs_at for engine in made)
        assert str(cluster.core.cluster.accepting("decode")[0].worker_id) != hung
        made[0].go_on.set()
        await cluster.until(lambda: len(cluster.core.cluster.accepting("decode")) == 2)
        assert await cluster.generate(PROMPT, N_NEW) == expected


async def test_without_another_worker_they_end_in_a_named_error(engines: Any) -> None:
    made, make = engines
    config = None
    async with open_cluster(make, config=config) as cluster:
        cluster.hub.decode_stall_s = 0.5
        tokens: list[int] = []
        with pytest.raises(ApiError):
            async for event in cluster.events(PROMPT, N_NEW):
                tokens.append(event.token)
                if len(tokens) == 5:
                    hang(cluster, "decode-0", 3)
        assert 5 <= len(tokens) < N_NEW
        made[0].go_on.set()
