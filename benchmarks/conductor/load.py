"""Send requests to a server of completions and time the answers, at a low cost.

Answers are not parsed: their events are counted by their first bytes. One process, one loop.

    python -m benchmarks.conductor.load < PLAN > FIGURES        (JSON, see `Plan` and `Figures`)
"""

import asyncio
import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Literal, cast

import msgspec
import uvloop

#: What counts as an event, and ends an answer: of a stream, and of a whole answer.
_STREAM_MARKS = b"data: {", b"0\r\n\r\n"
_WHOLE_MARKS = b'"usage"', b"}"


class Plan(msgspec.Struct, frozen=True):
    """What to send, and how."""

    port: int
    #: "open": Poisson arrivals; "closed": each of so many connections asks again at once.
    kind: Literal["open", "closed"]
    #: Requests per second, or connections.
    load: float
    seconds: float
    #: What the counting leaves out at the beginning.
    warm_s: float
    n_new: int
    seed: int
    #: Prompts as JSON values, used in turns.
    prompts: list[msgspec.Raw]
    #: Processes whose processor time is asked for.
    pids: list[int]
    #: Events of a complete answer, at least: tokens may be halves of a character.
    min_events: int | None = None
    #: Whether answers are streamed.
    stream: bool = True


class Figures(msgspec.Struct, frozen=True):
    """What was seen after the warming up."""

    #: Seconds to the first event, of each request.
    ttft_s: list[float]
    #: Seconds between events of a request, a sample of them.
    tbt_s: list[float]
    n_requests: int
    n_events: int
    n_failed: int
    seconds: float
    #: Processor seconds: of each process asked for, and of this one.
    cpu_s: list[float]
    own_cpu_s: float


class Connection(asyncio.Protocol):
    """A kept-alive connection with one request at a time."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._event, self._end = load.marks
        self._asked_s = self._last_s = 0.0
        self._n_seen = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to ask."""
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> None:
        """Send a request."""
        self._asked_s, self._n_seen, self._tail = time.perf_counter(), 0, b""
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Count what came."""
        now_s = time.perf_counter()
        if self._n_seen == 0 and not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._load.on_failure(data)
            self.transport.abort()
            return
        whole = self._tail + data
        if n := whole.count(self._event):
            if self._n_seen == 0:
                self._load.on_first(now_s - self._asked_s)
            elif n == 1:
                self._load.on_gap(now_s - self._last_s)
            self._last_s = now_s
            self._n_seen += n
            self._load.on_events(n)
        self._tail = whole[-(len(self._event) - 1) :]
        if whole.endswith(self._end):
            self._load.on_end(self, self._n_seen)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server hung up."""
        self._load.on_lost(self)


class Load:
    """One plan being carried out."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.marks = _STREAM_MARKS if plan.stream else _WHOLE_MARKS
        self._requests = [_request(plan, prompt) for prompt in plan.prompts]
        self._next = 0
        self._idle: deque[Connection] = deque()
        self._counting = False
        self._over = False
        self._ttft_s: list[float] = []
        self._tbt_s: list[float] = []
        self._n_gaps = self._n_events = self._n_requests = self._n_failed = 0

    async def run(self) -> Figures:
        """Do it."""
        plan = self._plan
        loop = asyncio.get_running_loop()
        loop.call_later(plan.warm_s, self._begin)
        if plan.kind == "closed":
            for _ in range(int(plan.load)):
                self._ask(await self._connect())
            await asyncio.sleep(plan.warm_s + plan.seconds)
        else:
            await self._poisson(plan.warm_s + plan.seconds)
        cpu_s, ended_s = self._cpu_s(), time.perf_counter()
        self._over = True
        spent_s = [after - before for after, before in zip(cpu_s, self._cpu_before_s, strict=True)]
        return Figures(
            ttft_s=self._ttft_s,
            tbt_s=self._tbt_s,
            n_requests=self._n_requests,
            n_events=self._n_events,
            n_failed=self._n_failed,
            seconds=ended_s - self._began_s,
            cpu_s=spent_s[:-1],
            own_cpu_s=spent_s[-1],
        )

    async def _poisson(self, seconds: float) -> None:
        dice = random.Random(self._plan.seed)
        began_s = due_s = time.perf_counter()
        while (due_s := due_s + dice.expovariate(self._plan.load)) < began_s + seconds:
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            # Another one when all are busy; what connecting takes is the request's wait.
            connection = self._idle.popleft() if self._idle else await self._connect()
            self._ask(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self), "127.0.0.1", self._plan.port
        )
        return connection

    def _cpu_s(self) -> list[float]:
        return [_cpu_of(pid) for pid in (*self._plan.pids, os.getpid())]

    def _ask(self, connection: Connection) -> None:
        connection.ask(self._requests[self._next % len(self._requests)])
        self._next += 1

    def _begin(self) -> None:
        self._counting = True
        self._began_s, self._cpu_before_s = time.perf_counter(), self._cpu_s()

    def on_first(self, ttft_s: float) -> None:
        """The first event of an answer."""
        if self._counting:
            self._ttft_s.append(ttft_s)

    def on_gap(self, tbt_s: float) -> None:
        """A later one."""
        self._n_gaps += 1
        if self._counting and self._n_gaps % 16 == 0:
            self._tbt_s.append(tbt_s)

    def on_events(self, n: int) -> None:
        """So many events."""
        if self._counting:
            self._n_events += n

    def on_end(self, connection: Connection, n_seen: int) -> None:
        """An answer is complete."""
        plan = self._plan
        if n_seen < (plan.n_new if plan.min_events is None else plan.min_events):
            self.on_failure(b"only %d events" % n_seen)
        if self._counting:
            self._n_requests += 1
        if self._plan.kind == "closed" and not self._over:
            self._ask(connection)
        else:
            self._idle.append(connection)

    def on_failure(self, said: bytes) -> None:
        """Another answer than was asked for."""
        self._n_failed += 1
        if self._n_failed == 1:
            print(said[:300], file=sys.stderr)

    def on_lost(self, connection: Connection) -> None:
        """A connection is gone."""
        if connection in self._idle:
            self._idle.remove(connection)


def _request(plan: Plan, prompt: msgspec.Raw) -> bytes:
    body = (
        b'{"model":"bench","prompt":%s,"max_tokens":%d,"ignore_eos":true,"temperature":0,'
        b'"stream":%s}' % (bytes(prompt), plan.n_new, b"true" if plan.stream else b"false")
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _cpu_of(pid: int) -> float:
    """Processor seconds of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    load = Load(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.buffer.write(msgspec.json.encode(runner.run(load.run())))
