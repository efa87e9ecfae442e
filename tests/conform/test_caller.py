"""What the kit hears from a worker, however fast the worker answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
import zmq
import zmq.asyncio

from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.curve_sockets import bind_free_port
from halfmoon_conform.peers.wire_maps import decode_frame, encode_map
from halfmoon_conform.verdict import CheckFailed
from halfmoon_protocol import schema

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
