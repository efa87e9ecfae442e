"""Sequences of hostile ZeroMQ frames on real sockets, to each kind of worker and to the conductor.

Frames are those that the conductor and its workers really send, and examples of all messages:
valid, repeated, reordered, with other values, with other bytes, cut, and as wrong numbers of
frames. Several connections of strangers send them while a victim generates. It gets its exact
tokens, every task lives, and in the end nothing is held. `tests/services/test_hostile_sequences.py`
has sequences that know more of each message.
`make fuzz N=20000 FUZZERS=tests/fuzz/test_message_frames.py` tries many.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol import codec
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.examples import EXAMPLES
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.kv_events import KvEventBatch, encode_payload, encode_sequence
from halfmoon_protocol.messages import (
    Cancel,
    Hello,
    Message,
    Produced,
    StartPrefill,
    TokensProduced,
    Welcome,
    WorkerInfo,
)
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import MEMBERS
from halfmoon_runtime.worker.message_loop import FAILED_MESSAGES
from halfmoon_testing.fuzz_inputs import cut_anywhere, mutate_bytes, n_fuzz_inputs
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_testing.worker_caller import mutate_message
from tests.fuzz.conftest import noted
from tests.nightly import by_day
from tests.services.conftest import open_cluster

pytestmark = pytest.mark.timeout(14_400)
N = n_fuzz_inputs(by_day(30, at_night=500))
PATIENCE_S = 20.0
ORACLE = FakeEngine()
N_NEW = 6
N_CALLERS = 4
ENCODED = [codec.encode(message) for message in EXAMPLES]


def n_failed() -> float:
    """Return how many messages only the last line of defence has caught."""
    return sum(
        s.value for m in FAILED_MESSAGES.collect() for s in m.samples if s.name.endswith("_total")
    )


def bent_frames(dice: Random, frame: bytes) -> list[bytes]:
    """Return the frames of one ZeroMQ message, made of one that is right."""
    match dice.random():
        case x if x < 0.35:
            return [frame]
        case x if x < 0.65:
            try:
                message: Any = mutate_message(codec.decode(frame), dice)
            except ProtocolError:
                message = None
            return [frame if message is None else codec.encode(message)]
        case x if x < 0.8:
            return [mutate_bytes(dice, frame)]
        case x if x < 0.87:
            return [cut_anywhere(dice, frame)]
        case x if x < 0.92:
            return [b"", frame]
        case x if x < 0.96:
            return [frame, dice.choice(ENCODED)]
    return [dice.choice((b"", b"\1", b"\1\xc0", b"\1" + b"\x91" * 5_000, dice.randbytes(300)))]


def decoded(frame: bytes) -> Any:
    try:
        return codec.decode(frame)
    except ProtocolError:
        return None


def a_prompt(dice: Random) -> list[int]:
    """Return a prompt; some come again, so that blocks are read from a kvstore, too."""
    return [(dice.randrange(6) * 131 + i * 7) % 990 for i in range(dice.randint(1, 70))]


class Sequences:
    """Sequences of frames, each beside a victim that generates, and what they said."""

    def __init__(self, dice: Random) -> None:
        self.dice, self.said = dice, Counter[str]()

    async def run(self, cluster: Any, speak: Any, after: Callable[[], None] = lambda: None) -> None:
        began_s, before = time.monotonic(), n_failed()
        for number in range(N):
            with noted(f"sequence {number}"):
                with capture_logs() as logs:
                    await self._beside_a_victim(cluster, speak)
                for line in logs:
                    _check_line(line)
                assert n_failed() == before, "only the last line of defence held"
            after()
        print(
            f"{N} sequences, {self.said.total()} messages of {len(self.said)} kinds "
            f"in {time.monotonic() - began_s:.1f} s"
        )

    async def _beside_a_victim(self, cluster: Any, speak: Any) -> None:
        prompt = a_prompt(self.dice)
        victim = asyncio.create_task(cluster.generate(prompt, N_NEW))
        await speak()
        async with asyncio.timeout(PATIENCE_S):
            assert await victim == ORACLE.expected(prompt, N_NEW)
        for member in cluster.members.values():
            assert not member.task.done()
            if hasattr(member.worker, "check"):
                member.worker.check()
        cluster.core.check()


def _check_line(line: Any) -> None:
    if line["log_level"] in ("error", "critical"):
        # A worker says so if a stranger wants it to believe that it is not welcome. So does a
        # conductor of a stranger that states other versions.
        stranger = str(line.get("worker_id", "")).endswith("-9")
        assert line["event"] in {"refused_by_conductor", "worker_refused" if stranger else ""}, line


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No library logs an error."""
    yield
    for line in caplog.get_records("call"):
        assert line.levelno < logging.ERROR, line.getMessage()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


# -- to workers --------------------------------------------------------------------------------


async def test_no_sequence_of_frames_harms_another_conductors_requests(
    dice: Random, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    sequences = Sequences(dice)
    network: Any = ZmqNetwork()
    settings = {"landing_ttl_s": 3.0, "quarantine_s": 0.05}
    cluster: Any
    async with open_cluster(n_pages=200, network=network, decode_settings=settings) as cluster:
        real: dict[str, deque[bytes]] = {name: deque(maxlen=40) for name in cluster.members}
        #: Starts of requests that are over, to be repeated as they are.
        over: deque[bytes] = deque(maxlen=40)
        live: list[bytes] = []
        send = cluster.hub._send

        def record(member: Any, link: Any, message: Message) -> None:
            # A peer that has a landing's key may write there until the landing has ended.
            if isinstance(message, StartPrefill):
                live.append(codec.encode(message))
            else:
                real[member.info.worker_id].append(codec.encode(message))
            send(member, link, message)

        cluster.hub._send = record
        callers = {
            name: [_dealer(context, member.worker.info.commands) for _ in range(N_CALLERS)]
            for name, member in cluster.members.items()
        }
        used: set[RequestId] = set()

        async def speak() -> None:
            name = dice.choice(list(callers))
            mine = callers[name]
            for _ in range(dice.randint(3, 14)):
                i = dice.randrange(N_CALLERS)
                if dice.random() < 0.02:
                    mine[i].close(linger=0)
                    mine[i] = _dealer(context, cluster.worker(name).info.commands)
                known = list(real[name])
                frame = dice.choice(known if known and dice.random() < 0.7 else ENCODED)
                frames = bent_frames(dice, frame)
                if over and name == "prefill-0" and dice.random() < 0.2:
                    # With other tokens under its hashes it would be a client that lies.
                    frames = [dice.choice(over)]
                message = decoded(frames[-1])
                kind = name if message is None else f"{name}: {type(message).__name__}"
                sequences.said[kind] += 1
                request_id = getattr(message, "request_id", None)
                if isinstance(request_id, str):
                    used.add(RequestId(request_id))
                mine[i].send_multipart(frames)
                while mine[i].poll(0):
                    mine[i].recv_multipart()
                if dice.random() < 0.4:
                    await asyncio.sleep(dice.choice((0, 0, 0.001, 0.002)))

        def end_all() -> None:
            over.extend(live)
            live.clear()
            ends = [codec.encode(Cancel(request_id=request_id)) for request_id in used]
            used.clear()
            for name in ("prefill-0", "decode-0"):
                for caller in callers[name]:
                    for frame in ends:
                        caller.send(frame)

        await sequences.run(cluster, speak, end_all)
        for sockets in callers.values():
            for caller in sockets:
                caller.close(linger=1000)
        await cluster.settled(stores=False)
        memory = cluster.worker("kvstore-0").tiers.memory
        memory.expire(cluster.clock.now() + 1000.0)
        assert (memory.n_reserved, memory.n_leased) == (0, 0)


def _dealer(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    caller = context.socket(zmq.DEALER)
    caller.setsockopt(zmq.LINGER, 0)
    caller.connect(endpoint)
    return caller


# -- to the conductor --------------------------------------------------------------------------


class FakeWorker:
    """Binds the sockets of a worker, and says what it likes to whoever says hello."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", name: str) -> None:
        self.router, self.pub = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        commands = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        events = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        plain = a_worker(name, layout=ORACLE.layout, model="m", draining=True)
        self.info: WorkerInfo = msgspec.structs.replace(plain, commands=commands, events=events)
        self.conductors: list[bytes] = []

    def hear(self) -> None:
        while self.router.poll(0):
            caller, *frames = self.router.recv_multipart()
            if isinstance(decoded(frames[-1]), Hello) and caller not in self.conductors:
                self.conductors.append(caller)
                self.answer([codec.encode(Welcome(worker=self.info))])

    def answer(self, frames: list[bytes]) -> None:
        for conductor in self.conductors[-1:]:
            self.router.send_multipart([conductor, *frames])

    def close(self) -> None:
        self.router.close(linger=0)
        self.pub.close(linger=0)


def about(message: Any, request_id: RequestId) -> Any:
    """Return the same of another request."""
    if isinstance(message, TokensProduced):
        produced = tuple(Produced(request_id, one.token, one.finish) for one in message.produced)
        return msgspec.structs.replace(message, produced=produced)
    if hasattr(message, "request_id"):
        return msgspec.structs.replace(message, request_id=request_id)
    return message


async def test_no_sequence_of_frames_of_workers_harms_requests_of_others(
    dice: Random, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    sequences = Sequences(dice)
    said = sequences.said
    network: Any = ZmqNetwork()
    fakes = [FakeWorker(context, name) for name in ("prefill-9", "decode-9", "kvstore-9")]
    cluster: Any
    async with open_cluster(network=network) as cluster:
        heard: deque[bytes] = deque(maxlen=60)
        batches: deque[KvEventBatch] = deque(maxlen=20)
        receive = cluster.hub._receive

        def listen(member: Any, message: Any) -> None:
            if isinstance(message, KvEventBatch):
                batches.append(message)
            elif member.info.worker_id not in {fake.info.worker_id for fake in fakes}:
                heard.append(codec.encode(message))
            receive(member, message)

        cluster.hub._receive = listen
        for fake in fakes:
            cluster.store.put(MEMBERS + fake.info.worker_id, msgspec.json.encode(fake.info))

        def joined() -> bool:
            for fake in fakes:
                fake.hear()
            return all(cluster.hub._members.get(f.info.worker_id) for f in fakes) and all(
                fake.conductors for fake in fakes
            )

        await cluster.until(joined)

        async def speak() -> None:
            live = RequestId(f"cmpl-{cluster.n_requests + 1}")
            for _ in range(dice.randint(3, 20)):
                fake = dice.choice(fakes)
                fake.hear()
                if dice.random() < 0.25:
                    frames = publication()
                    fake.pub.send_multipart(frames)
                    said["publication"] += 1
                    continue
                known = list(heard)
                frame = dice.choice(known if known and dice.random() < 0.6 else ENCODED)
                if dice.random() < 0.4:
                    frame = codec.encode(about(codec.decode(frame), live))
                frames = bent_frames(dice, frame)
                message = decoded(frames[-1])
                if isinstance(message, Welcome) and not message.worker.draining:
                    continue  # it would be given requests, and the victim would depend on it
                fake.answer(frames)
                said["nothing" if message is None else type(message).__name__] += 1
                if dice.random() < 0.3:
                    await asyncio.sleep(dice.choice((0, 0.001)))

        def publication() -> list[bytes]:
            if batches and dice.random() < 0.7:
                batch = dice.choice(batches)
                number = dice.choice((0, 1, 2, 7, 2**31, 2**63 - 1, -1))
                payload = encode_payload(batch.events, batch.timestamp)
                if dice.random() < 0.7:
                    payload = mutate_bytes(dice, payload)
                return [b"kv", encode_sequence(number), payload]
            frames = [b"load", *bent_frames(dice, dice.choice([*heard, *ENCODED]))]
            last = decoded(frames[-1])
            return [b"load"] if isinstance(last, Welcome) else frames

        await sequences.run(cluster, speak)
        await cluster.settled()
    for fake in fakes:
        fake.close()
    assert said["publication"] and said["TokensProduced"]
