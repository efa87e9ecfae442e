"""What a worker says while no conductor has connected to it."""

import msgspec
import pytest

from halfmoon_metadata import MemoryStore, MetadataUnreachable
from halfmoon_runtime.clock import FakeClock
from halfmoon_runtime.worker.conductor_watch import (
    ASK_AFTER_S,
    CONDUCTORS,
    SAY_AFTER_S,
    ConductorRecord,
    ConductorWatch,
)
from tests.runtime.service_parts import info_of

ADDRESS = "tcp://10.9.9.9:4321"
INFO = info_of("decode-0", commands=ADDRESS)


class Watched:
    """A registered worker, its clock, and what it reports."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), FakeClock()
        self.n_conductors = 0
        self.reported: list[str] = []
        self.watch = ConductorWatch(
            self.store, INFO, lambda: self.n_conductors, self.reported.append, self.clock.now
        )

    def write(self, name: str = "conductor-0", **unreachable: str) -> None:
        named = {worker.replace("_", "-"): reason for worker, reason in unreachable.items()}
        self.store.put(CONDUCTORS + name, msgspec.json.encode(ConductorRecord(name, named)))

    async def after(self, seconds: float) -> str:
        """What is reported once so many seconds have passed."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            await self.watch.look()
        return self.reported[-1] if self.reported else ""


@pytest.fixture
def watched() -> Watched:
    return Watched()


async def test_a_conductor_that_can_not_reach_it_is_named_with_its_reason_and_the_way_out(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.write(decode_0="connection refused")
    said = await watched.after(ASK_AFTER_S + 1)
    assert said.startswith(f"conductor-0 can't reach this worker at {ADDRESS}: connection refused")
    assert "--advertise-host (HALFMOON_ADVERTISE_HOST)" in said
    await watched.after(100)
    assert capsys.readouterr().out.count("no_conductor") == 1
    await watched.after(300)
    assert capsys.readouterr().out.count("no_conductor") == 1


@pytest.mark.parametrize(
    ("is_there", "parts"),
    [
        (True, ("conductor-0 has not connected to this worker at", "--advertise-host")),
        (False, ("none is registered: start one", "--metadata")),
    ],
)
async def test_a_conductor_that_has_not_connected_and_a_missing_one_are_told(
    watched: Watched, is_there: bool, parts: tuple[str, ...]
) -> None:
    if is_there:
        watched.write(decode_1="connection refused")
    assert await watched.after(SAY_AFTER_S - 1) == ""
    said = await watched.after(10)
    assert ADDRESS in said and all(part in said for part in parts)


async def test_it_is_over_when_a_conductor_connects_and_begins_anew_when_all_have_left(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await watched.after(SAY_AFTER_S + 10)
    watched.n_conductors = 1
    assert await watched.after(1) == ""
    assert "conductor_connected" in capsys.readouterr().out
    assert watched.watch.metrics()["halfmoon_worker_conductors"][1] == 1
    await watched.after(500)
    watched.n_conductors = 0
    assert await watched.after(SAY_AFTER_S - 1) == ""
    assert await watched.after(10)


@pytest.mark.parametrize(
    "record", [b"", b"[]", b"\xff", b'{"conductor_id": 1}', b"[" * 5000, b"x" * 2_000_000]
)
async def test_a_record_that_is_none_is_passed_over(watched: Watched, record: bytes) -> None:
    watched.store.put(CONDUCTORS + "conductor-1", record)
    watched.write(decode_0="r" * 100_000)
    said = await watched.after(SAY_AFTER_S + 10)
    assert said.startswith("conductor-0 can't reach") and len(said) < 1000


async def test_an_outage_of_metadata_is_not_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(prefix: str) -> dict[str, bytes]:
        raise MetadataUnreachable("away")

    monkeypatch.setattr(watched.store, "list", away)
    await watched.after(SAY_AFTER_S + 10)
    assert watched.reported == []
