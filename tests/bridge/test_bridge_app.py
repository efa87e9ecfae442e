"""A bridge as a whole: its settings, its metrics, its end."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import pytest

from halfmoon_runtime.observability.metrics import LabelledValues
from halfmoon_servers.bridge.bridge_metrics import bridge_metrics
from halfmoon_servers.bridge.bridge_settings import BridgeSettings
from halfmoon_servers.bridge.server_target import BadTarget, ServerTarget, parse_target
from tests.bridge.conftest import routed
from tests.bridge.plain_server import answer_of, plain_servers

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_a_server_is_a_url_with_endpoints_behind_it() -> None:
    assert parse_target("http://h:8001/v1/", "both") == ServerTarget("http://h:8001")
    text = "https://h/base, events=tcp://h:5557,replay=tcp://h:5558"
    assert parse_target(text, "prefill") == ServerTarget(
        "https://h/base", "prefill", "tcp://h:5557", "tcp://h:5558"
    )
    for wrong in (
        *("", "h:8001", "ftp://h", "http://", "http://h:port", "http://h:99999", "http://h?x=1"),
        *("http://h,events", "http://h,events=h:5557", "http://h,replay=tcp://h:1"),
        *("http://h,events=tcp://h:1,events=tcp://h:2", "http://h,other=tcp://h:1"),
    ):
        with pytest.raises(BadTarget):
            parse_target(wrong, "both")


A_SERVER = '[{"url": "http://h"}]'


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["http://h"], "no JSON list"),
        (["[]"], "0 servers"),
        (['[{"url": "http://h", "role": "both", "more": 1}]'], "more"),
        (['[{"url": "http://h", "role": "kvstore"}]'], "role"),
        (['[{"url": "http://h", "role": "prefill"}]'], "--prefill needs --decode"),
        (['[{"url": "http://h", "role": "decode"}]'], "--decode needs --prefill"),
        (['[{"url": "http://h"}, {"url": "http://h"}]'], "http://h is named twice"),
        ([A_SERVER, "--block-size", "8"], "16 to 512"),
        ([A_SERVER, "--server-api-key", "k"], "HALFMOON_SERVER_API_KEY"),
    ],
)
def test_flags_that_can_not_be_used_end_the_process_with_the_reason(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BridgeSettings.from_args(["--targets", A_SERVER]).servers == [ServerTarget("http://h")]
    with pytest.raises(SystemExit) as end:
        BridgeSettings.from_args(["--targets", *flags])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


async def test_the_page_on_metrics_lists_those_of_a_bridge(prompt: list[int]) -> None:
    async with plain_servers(2) as servers, routed(*servers) as fleet:
        await fleet.generate(prompt, 1)
        await fleet.until_indexed(0, 24)
        await fleet.generate(prompt, 5)
        await fleet.settled()
        await fleet.until(lambda: servers[0].n_open == 0)
        await servers[1].kill()
        await fleet.until(lambda: fleet.supervisors[1].session is None)
        metrics = bridge_metrics(fleet.supervisors)
        await servers[1].open()
    rows = set(re.findall(r"^\| `(halfmoon_bridge_\w+)` \|", METRICS_PAGE.read_text(), re.M))
    assert rows == set(metrics)
    values = {}
    for name, (_, labelled) in metrics.items():
        assert isinstance(labelled, LabelledValues)
        values[name] = {key[0]: value for key, value in labelled.values.items()}
    a, b = (server.url for server in servers)
    assert values["halfmoon_bridge_server_up"] == {a: 1, b: 0}
    assert values["halfmoon_bridge_sessions_total"] == {a: 1, b: 1}
    assert values["halfmoon_bridge_expected_cached_tokens"] == {a: 384}
    assert values["halfmoon_bridge_reported_cached_tokens"] == {a: 384}


async def test_a_bridge_that_stops_lets_requests_finish(prompt: list[int]) -> None:
    async with plain_servers(2) as servers, routed(*servers) as fleet:
        for server in servers:
            server.go.clear()
        task = asyncio.create_task(fleet.generate(prompt, 9))
        await fleet.until(lambda: any(server.n_open for server in servers))
        (at,) = [i for i, server in enumerate(servers) if server.n_open]
        session = fleet.supervisors[at].session
        assert session is not None
        draining = asyncio.create_task(session.drain())
        await fleet.until_live(1 - at)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.shield(draining)
        assert not draining.done(), "a request is still there"
        servers[at].go.set()
        servers[1 - at].go.set()
        assert await task == answer_of(prompt, 9)
        await draining
        assert len(servers[at].bodies) == 1, "it went on where it was"
