"""Measure the decisions of the scheduling core, alone on one processor core.

512 workers, prompts of 32k tokens in blocks of 512, half of them cached somewhere. A decision
is the handling of `RequestArrived`: longest prefixes, the choice, its explanation, the books.
Seconds are those of the CPU, so other programs on the machine do not count. A whole request adds
the reservation's answer, the prefill's end and the decode's end.

The second table is of clusters of other sizes; half of the workers prefill, half decode. The third
table is of load reports of decode workers that have no page free, while no request waits for
pages, and while one does.

    python -m benchmarks scheduling                    all tables
    python -m benchmarks.scheduling                    the second table alone
    python -m benchmarks.scheduling --profile 10000    where the time goes with so many workers
"""

import argparse
import cProfile
import pstats
import random
import time
from collections import deque
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import BlocksSnapshot, DecodeLoad, DecodeReserved, PrefillDone
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    MessageReceived,
    Request,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
)
from halfmoon_testing.scheduling_inputs import a_worker

N_PREFILL = N_DECODE = 256
BLOCK_SIZE, N_TOKENS = 512, 32 * 1024
N_BLOCKS = N_TOKENS // BLOCK_SIZE
CASES: tuple[tuple[str, str, int], ...] = (
    ("kvcache_centric", "early", 10_000),
    ("kvcache_centric", "early", 100_000),
    ("kvcache_centric", "early", 1_000_000),
    ("min_ttft", "early", 1_000_000),
    ("kvcache_centric", "predicted", 1_000_000),
    ("kvcache_centric", "lookahead", 1_000_000),
)
#: Workers of the second table.
SIZES = (64, 512, 2048, 10_000)
#: Requests at each prefill worker, and at each decode worker.
PREFILLING, DECODING = 3, 16
LAYOUT = KvLayout(
    model="bench", n_layers=80, n_kv_heads=8, head_dim=128, dtype="float16", block_size=BLOCK_SIZE
)


def run(console: Console, n: int = 2000) -> None:
    """Measure over the size of the index, and then over what decides."""
    table = Table(
        title=f"Scheduling, {N_PREFILL} prefill and {N_DECODE} decode workers, "
        f"{N_TOKENS // 1024}k-token prompts, one core",
        box=None,
    )
    table.add_column("placement, admission", no_wrap=True)
    for column in ("indexed blocks", "decisions/s", "mean µs", "p99 µs", "requests/s"):
        table.add_column(column, justify="right")
    for placement, admission, n_indexed in CASES:
        busy = Busy.of(placement, admission, n_indexed)
        deciding, whole_s = busy.measure(n)
        mean_s = sum(deciding) / n
        table.add_row(
            f"{placement}, {admission}",
            f"{n_indexed:,}",
            f"{1 / mean_s:,.0f}",
            f"{mean_s * 1e6:.0f}",
            f"{sorted(deciding)[int(n * 0.99)] * 1e6:.0f}",
            f"{n / whole_s:,.0f}",
        )
    console.print(table)
    run_sizes(console, n)
    run_reports(console, n)


def run_sizes(console: Console, n: int = 2000) -> None:
    """Measure over the number of workers, with explanations of 256 decisions kept."""
    table = Table(title="The same, by the number of workers", box=None)
    for column in ("workers", "decisions/s", "mean µs", "p99 µs", "of the first", "requests/s"):
        table.add_column(column, justify="right")
    first_s = 0.0
    for n_workers in SIZES:
        busy = Busy.of("kvcache_centric", "early", 1_000_000, n_workers // 2)
        deciding, whole_s = busy.measure(n)
        mean_s = sum(deciding) / n
        first_s = first_s or mean_s
        table.add_row(
            f"{n_workers:,}",
            f"{1 / mean_s:,.0f}",
            f"{mean_s * 1e6:.0f}",
            f"{sorted(deciding)[int(n * 0.99)] * 1e6:.0f}",
            f"{first_s / mean_s:.2f}",
            f"{n / whole_s:,.0f}",
        )
    console.print(table)


def profile(n_workers: int, n: int = 2000) -> None:
    """Print where the time of whole requests goes."""
    busy = Busy.of("kvcache_centric", "early", 1_000_000, n_workers // 2)
    profiler = cProfile.Profile()
    profiler.runcall(busy.measure, n)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def run_reports(console: Console, n: int = 2000) -> None:
    """Measure load reports that show no room."""
    table = Table(title="Load reports of decode workers without a free page", box=None)
    for column in ("requests that wait", "median µs", "mean µs", "p99 µs"):
        table.add_column(column, justify="right")
    busy = Busy.of("kvcache_centric", "none", 10_000)
    busy.fill_decodes()
    for n_waiting in (0, 1):
        if n_waiting:
            busy.core.handle(RequestArrived(busy.a_request()), busy.now)
        seconds = sorted(busy.report() for _ in range(n))
        table.add_row(
            str(n_waiting),
            f"{seconds[n // 2] * 1e6:.0f}",
            f"{sum(seconds) / n * 1e6:.0f}",
            f"{seconds[int(n * 0.99)] * 1e6:.0f}",
        )
    console.print(table)


@dataclass
class Busy:
    """A conductor with its queues and batches full, and requests to come."""

    core: Conductor
    #: Workers of each role.
    n_each: int
    dice: random.Random
    #: Whole prompts, of which the kvstores hold prefixes.
    prompts: list[tuple[BlockHash, ...]]
    now: float = 0.0
    n_arrived: int = 0
    n_reports: int = 0
    prefilling: deque[Request] = field(default_factory=deque)
    decoding: deque[RequestId] = field(default_factory=deque)

    @classmethod
    def of(cls, placement: str, admission: str, n_indexed: int, n_each: int = N_PREFILL) -> "Busy":
        """Everything joined, indexed and full."""
        config = SchedulingConfig(
            placement=placement, admission=admission, ttft_slo_s=1e6, tbt_slo_s=1e6
        )
        core, dice = Conductor(config), random.Random(1)
        for i in range(n_each):
            for role in ("prefill", "decode", "kvstore"):
                home = f"kvstore-{i:03}" if role == "prefill" else None
                worker = a_worker(
                    f"{role}-{i:03}",
                    layout=LAYOUT,
                    n_blocks=100_000,
                    max_context=200_000,
                    home_kvstore=home,
                )
                core.handle(WorkerJoined(worker), 0.0)
        prompts = [_some_hashes(dice, N_BLOCKS) for _ in range(max(1, n_indexed // N_BLOCKS))]
        held: dict[int, list[BlockHash]] = {i: [] for i in range(n_each)}
        for prompt in prompts:
            first = dice.randrange(n_each)
            for holder, n_blocks in ((first, N_BLOCKS), (first + 1, dice.randrange(N_BLOCKS))):
                held[holder % n_each] += prompt[:n_blocks]
        for i, hashes in held.items():
            snapshot = BlocksSnapshot(sequence=0, hashes=tuple(hashes))
            core.handle(MessageReceived(WorkerId(f"kvstore-{i:03}"), snapshot), 0.0)
        busy = cls(core, n_each, dice, prompts)
        while len(busy.prefilling) < PREFILLING * n_each:
            busy.arrive()
        while len(busy.decoding) < DECODING * n_each:
            busy.arrive()
            busy.end_a_prefill()
        return busy

    def measure(self, n: int) -> tuple[list[float], float]:
        """Seconds of each decision, and of all the handling of as many whole requests."""
        deciding: list[float] = []
        whole_s = 0.0
        for _ in range(n):
            self.now += 1e-3
            began = time.thread_time()
            self.end_a_decode()
            self.end_a_prefill()
            whole_s += time.thread_time() - began
            seconds = self.arrive()
            deciding.append(seconds[0])
            whole_s += sum(seconds)
        return deciding, whole_s

    def arrive(self) -> tuple[float, float]:
        """A request comes and is granted pages; seconds of deciding, and of the grant."""
        request = self.a_request()
        event = RequestArrived(request)
        began = time.thread_time()
        commands = self.core.handle(event, self.now)
        decided = time.thread_time()
        granted = DecodeReserved(request_id=request.request_id, landing=_LANDING, expires_s=600.0)
        self.core.handle(MessageReceived(_receiver(commands), granted), self.now)
        self.prefilling.append(request)
        return decided - began, time.thread_time() - decided

    def end_a_prefill(self) -> None:
        """The oldest prefill is done."""
        request = self.prefilling.popleft()
        request_id = request.request_id
        prefill = self.core.prefill_of(request_id)
        assert prefill is not None
        done = PrefillDone(
            request_id=request_id,
            first_token=1,
            finish="",
            n_cached=0,
            queue_s=0.0,
            compute_s=1.0,
            drain_s=0.0,
        )
        self.core.handle(MessageReceived(prefill, done), self.now)
        self.decoding.append(request_id)

    def end_a_decode(self) -> None:
        """The oldest decode is done."""
        self.core.handle(RequestFinished(self.decoding.popleft(), 200), self.now)

    def fill_decodes(self) -> None:
        """Every decode worker says that none of its pages is free."""
        for _ in range(self.n_each):
            self.report()

    def report(self) -> float:
        """The next decode worker in turn reports; seconds of handling that."""
        self.now += 1e-4
        self.n_reports += 1
        worker = WorkerId(f"decode-{self.n_reports % self.n_each:03}")
        load = DecodeLoad(
            n_running=DECODING,
            n_reserved=0,
            context_tokens=N_TOKENS * DECODING,
            free_pages=0,
            n_pages=100_000,
            step_s=0.02,
        )
        began = time.thread_time()
        self.core.handle(MessageReceived(worker, load), self.now)
        return time.thread_time() - began

    def a_request(self) -> Request:
        """The next one; half of it is cached somewhere."""
        self.n_arrived += 1
        known = self.dice.choice(self.prompts)[: N_BLOCKS // 2]
        return Request(
            request_id=RequestId(f"cmpl-{self.n_arrived}"),
            token_ids=_TOKENS,
            n_prompt=N_TOKENS,
            block_hashes=known + _some_hashes(self.dice, N_BLOCKS - len(known)),
            sampling=Sampling(),
            stopping=Stopping(max_new_tokens=512),
        )


_TOKENS = (7,) * N_TOKENS
#: Pages for a whole prompt, as any decode worker might grant them.
_LANDING = Landing(
    region=Region(
        segment="bench", generation=1, key=bytes(16), length=N_BLOCKS * LAYOUT.block_bytes
    ),
    pages=tuple(range(N_BLOCKS)),
    layout=LAYOUT,
)


def _some_hashes(dice: random.Random, n: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(dice.randbytes(16)) for _ in range(n))


def _receiver(commands: list[AnyCommand]) -> WorkerId:
    (command,) = commands
    assert isinstance(command, Send), command
    return command.worker_id


def main() -> None:
    """Print the second table, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=int, metavar="WORKERS", help="profile instead")
    parser.add_argument("-n", type=int, default=2000, help="decisions of each row")
    options = parser.parse_args()
    if options.profile:
        profile(options.profile, options.n)
    else:
        run_sizes(Console(), options.n)


if __name__ == "__main__":
    main()
