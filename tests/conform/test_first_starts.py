"""What the kit says of a service that is not there yet or answers wrongly, and what it leaves."""

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio

from halfmoon_conform.data_cases.case_values import CaseError, fill
from halfmoon_conform.peers import transfer_frames
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.curve_sockets import bind_free_port, secure_port
from halfmoon_conform.peers.event_listener import EventListener
from halfmoon_conform.peers.wire_maps import decode_frame, encode_map
from halfmoon_conform.subject import subject as subject_module
from halfmoon_conform.subject.metadata_server import MetadataServer
from halfmoon_conform.subject.subject import CannotStartSubject, Subject, SubjectProcess, fill_in
from halfmoon_conform.verdict import CheckFailed
from halfmoon_protocol import schema

KEY, OTHER_KEY = "the moon is made of green cheese", "the moon is made of blue cheese"
CONFORM = [sys.executable, "-m", "halfmoon_cli", "conform", "kvstore", "--only", "worker.hello.*"]


def test_a_misspelt_placeholder_is_named_before_anything_is_started() -> None:
    done = subprocess.run(
        [*CONFORM, "--", "./no-such-program", "{metdata}"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no placeholder {metdata}; there are {metadata}, {worker_id}" in done.stderr
    assert fill_in(["sh", "-c", "${HOME} {port}"], {"port": "7"}) == ["sh", "-c", "${HOME} 7"]


def test_a_service_that_does_not_register_is_told_of_in_time_with_what_it_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject_module, "START_S", 1.0)
    monkeypatch.setattr(subject_module, "_TELL_AFTER_S", 0.1)
    server = MetadataServer(KEY)
    lines: list[str] = []

    async def start() -> str:
        process = SubjectProcess(["sleep", "60"], {}, tmp_path / "log")
        subject = Subject("kvstore-0", server.store, KEY, process)
        subject.describe_requests, subject.on_wait = server.describe_requests, lines.append
        with pytest.raises(CannotStartSubject) as told:
            await subject.start()
        await process.kill()
        return str(told.value)

    try:
        assert "No request has come to the metadata server" in asyncio.run(start())
        assert "waiting for the record 'halfmoon/members/kvstore-0', 1 s at the most" in lines[0]
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{server.url}?key=a")
        assert "answered requests: 1 with 401 (401: the request shows no" in asyncio.run(start())
    finally:
        server.close()


def test_what_an_answer_lacks_is_the_services_fault_and_an_unknown_name_is_the_cases() -> None:
    with pytest.raises(CheckFailed, match=r"record\.events is not there: no 'events' in"):
        fill("$record.events", {"record": {"commands": "tcp://127.0.0.1:1"}})
    with pytest.raises(CaseError, match="no step before captured 'recrod'"):
        fill("$recrod.events", {"record": {}})


def test_what_is_wrong_with_a_hello_is_named() -> None:
    fault = transfer_frames.start_fault
    hello = transfer_frames.HELLO
    assert fault(hello, hello, 1, 66) == ""
    assert "a u16 of little-endian, is 16896, at most 4096" in fault(hello, hello, 1, 16896)
    assert "its version is 2" in fault(hello, hello, 2, 66)
    assert "begins with b'HMTQ', not with b'HMTH'" in fault(hello, b"HMTQ", 1, 66)


@pytest.mark.parametrize(("port_key", "key"), [(KEY, OTHER_KEY), ("", KEY), (KEY, "")])
def test_a_failed_handshake_is_said_where_nothing_comes(port_key: str, key: str) -> None:
    async def call() -> tuple[str, str]:
        context = zmq.asyncio.Context()
        router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        for port in (router, publisher):
            secure_port(port, port_key)
        caller = Caller(context, bind_free_port(router), key, answer_s=2.0)
        listener = EventListener(context, bind_free_port(publisher), "w", key, event_s=2.0)
        with pytest.raises(CheckFailed) as no_answer:
            await caller.greet("c")
        with pytest.raises(CheckFailed) as no_load:
            await listener.wait_for(lambda: bool(listener.loads), "load")
        await caller.close()
        await listener.close()
        context.destroy(linger=0)
        return str(no_answer.value), str(no_load.value)

    for told in asyncio.run(call()):
        assert "ZeroMQ's handshake failed" in told
        assert ("with CURVE at the kit's side" in told) == bool(key)


def test_a_kit_that_is_asked_to_stop_leaves_no_service_behind() -> None:
    kit = subprocess.Popen(
        [*CONFORM, "--", "sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        started: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while not any("sleep" in each.name() for each in started):
            assert time.monotonic() < deadline and kit.poll() is None
            started = psutil.Process(kit.pid).children(recursive=True)
        kit.send_signal(signal.SIGTERM)
        kit.wait(60)
        psutil.wait_procs(started, timeout=30)
        assert not any(each.is_running() for each in started)
    finally:
        kit.kill()


# -- answers that came before anybody looked ------------------------------------------------------


WELCOME = next(
    bytes.fromhex(golden["frame_hex"])
    for golden in json.loads((schema.HOME / "golden" / "messages.json").read_text())
    if golden["type"] == "welcome"
)
NO_MESSAGE = b"\x01\x81\xa4type\xa7welcome"


async def _play_worker(router: zmq.asyncio.Socket) -> None:
    """Send back what is unwanted, and answer a hello of foreign versions as a worker does."""
    while True:
        peer, frame = await router.recv_multipart()
        if frame not in (WELCOME, NO_MESSAGE):
            answer = {"type": "wrong_version", "got": decode_frame(frame)["max_version"]}
            frame = encode_map({**answer, "min_version": 1, "max_version": 1})
        await router.send_multipart([peer, frame])


async def _hear(unwanted: bytes, look: Callable[[Caller], Awaitable[object]]) -> str:
    """Look once an unwanted frame and an answer have come; return what the kit says."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    caller = Caller(context, bind_free_port(router), "", answer_s=30.0)
    worker = asyncio.create_task(_play_worker(router))
    try:
        await caller.send_frames(unwanted)
        # Its answer comes behind the other one.
        hello = {"type": "hello", "conductor_id": "c", "session": 1, "max_version": 99}
        await caller.send(hello)
        while "wrong_version" not in caller.received:
            assert not worker.done()
            await asyncio.sleep(0.001)
        with pytest.raises(CheckFailed) as failed:
            await look(caller)
        return str(failed.value)
    finally:
        worker.cancel()
        await caller.close()
        context.destroy(linger=0)


def test_what_must_not_come_is_noticed_though_it_came_before_anybody_looked() -> None:
    told = asyncio.run(_hear(WELCOME, lambda caller: caller.expect_none({"type": "welcome"})))
    assert "answered " in told and "welcome" in told


def test_a_frame_that_is_no_message_is_noticed_beside_a_good_answer() -> None:
    told = asyncio.run(_hear(NO_MESSAGE, lambda caller: caller.expect({"type": "wrong_version"})))
    assert "is no message" in told
