"""What the kit hears from a worker, however fast the worker answers."""

import asyncio
import json

import pytest
import zmq
import zmq.asyncio

from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.curve_sockets import bind_free_port
from halfmoon_conform.peers.wire_maps import decode_frame, encode_map
from halfmoon_conform.verdict import CheckFailed
from halfmoon_protocol import schema

GOLDEN = schema.HOME / "golden"


WELCOME = next(
    bytes.fromhex(golden["frame_hex"])
    for golden in json.loads((GOLDEN / "messages.json").read_text())
    if golden["type"] == "welcome"
)
NO_MESSAGE = b"\x01\x81\xa4type\xa7welcome"
UNWANTED = {WELCOME: "answered .*welcome", NO_MESSAGE: "is no message: .*worker"}


async def _play_worker(router: zmq.asyncio.Socket) -> None:
    """Send back what is unwanted, and answer a hello of foreign versions as a worker does."""
    while True:
        peer, frame = await router.recv_multipart()
        if frame not in UNWANTED:
            answer = {"type": "wrong_version", "got": decode_frame(frame)["max_version"]}
            frame = encode_map({**answer, "min_version": 1, "max_version": 1})
        await router.send_multipart([peer, frame])


@pytest.mark.parametrize("unwanted", UNWANTED, ids=["a message", "no message"])
def test_what_must_not_come_is_noticed_though_it_came_before_anybody_looked(
    unwanted: bytes,
) -> None:
    async def call() -> None:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        caller = Caller(context, bind_free_port(router), "", answer_s=30.0)
        worker = asyncio.create_task(_play_worker(router))
        try:
            await caller.expect_none({"type": "welcome"})
            await caller.send_frames(unwanted)
            # Its answer comes behind the other one.
            hello = {"type": "hello", "conductor_id": "c", "session": 1, "max_version": 99}
            await caller.send(hello)
            while caller.received.count("wrong_version") < 2:
                assert not worker.done()
                await asyncio.sleep(0.001)
            with pytest.raises(CheckFailed, match=UNWANTED[unwanted]):
                await caller.expect_none({"type": "welcome"})
        finally:
            worker.cancel()
            await caller.close()
            context.destroy(linger=0)

    asyncio.run(call())
