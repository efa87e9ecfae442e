"""Placement by the orders of the pools, beside the placement that compares all workers.

Two conductors get the same events of a random cluster; one of them compares all workers. Every
command and every explained decision must be equal, to the bit of each predicted time. Numbers are
drawn from few, so that times are often equal. HALFMOON_RANDOM_CLUSTERS sets how many clusters, and
HALFMOON_RANDOM_SEED from which number on they are drawn; a failure names the number of its cluster.
"""

import os
import random
from typing import Any
from unittest import mock

import msgspec
import pytest

from halfmoon_protocol.ids import RequestId, WorkerId, retry_id
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    Cancel,
    DecodeCost,
    DecodeFailed,
    DecodeRefused,
    DecodeReserved,
    PrefillCost,
    PrefillFailed,
    PrefillStopped,
    ReserveDecode,
    Stage,
    StartDecode,
    StartPrefill,
    ToConductor,
    WorkerInfo,
)
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.cluster import linear_order
from halfmoon_scheduling.commands import AnyCommand, Fail, Reject, Resubmit, Send
from halfmoon_scheduling.conductor import ordered_placement, placer
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
    with_casualty,
)
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_testing.scheduling_inputs import a_landing, a_request, a_worker
from tests.nightly import by_day
from tests.scheduling.core import Core, decode_load, kv_stored, prefill_done, prefill_load

N_CLUSTERS = int(os.environ.get("HALFMOON_RANDOM_CLUSTERS", by_day(15, at_night=300)))
#: Prompts of a cluster; their lengths in tokens, 16 to a block.
N_PROMPTS, LENGTHS = 4, (5, 16, 17, 40, 100, 100, 330)
ROLES = ("prefill", "decode", "kvstore")


class Pair:
    """Two conductors in one random cluster: one searches, the other one compares all workers."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.config = self.a_config()
        self.conductors = [Conductor(self.config), Conductor(self.config)]
        self.conductors[1]._placer.searches = False
        self.now = dice.choice((0.0, 1e6))
        self.requests: dict[RequestId, Request] = {}
        #: What workers were sent and have not answered; answers come in any order.
        self.sent: list[Send] = []
        self.decoding: list[RequestId] = []
        self.sequence = 0
        self.n_placed = 0
        self.priorities = dice.choice(((0,), (0, 0, 0, 1), range(-9, 9)))
        #: Of the cluster: whether there are groups, local prefill, one profile for all.
        self.grouped, self.local, self.alike = (dice.random() < p for p in (0.2, 0.2, 0.5))
        self.names = [
            f"{role}-{i}"
            for role, most in zip(
                ROLES, dice.choice(((3, 3, 2), (12, 12, 9), (40, 9, 6))), strict=True
            )
            for i in range(dice.randint(1, most))
        ]

    def a_config(self) -> SchedulingConfig:
        dice = self.dice
        return msgspec.convert(
            {
                "placement": dice.choice([*PLACEMENT_MODES, "kvcache_centric"]),
                "kvcache_balancing_threshold": dice.choice((1.0, 1.5, 3.0)),
                "group_least_gain": dice.choice((1.0, 1.2)),
                "admission": dice.choice(list(ADMISSION_MODES)),
                "admission_quantile": dice.choice((0.0, 0.9)),
                "double_check": dice.random() < 0.3,
                "ttft_slo_s": dice.choice((None, 0.5, 5.0)),
                "tbt_slo_s": dice.choice((None, 0.02)),
                "ttft_slo_multiple": dice.choice((None, 5.0)),
                "max_queue_s": dice.choice((None, 20.0)),
                "max_waiting": dice.choice((2, 256)),
                "replication_bytes_per_s": dice.choice((0.0, 1e6)),
                "replication_hot_uses": 2.0,
                "prior_bandwidth": dice.choice((1e3, 1e4, 1e9)),
                "request_timeout_s": 30.0,
                "kept_decisions": 4,
            },
            SchedulingConfig,
        )

    # -- both conductors ---------------------------------------------------------------------

    def handle(self, event: AnyEvent) -> None:
        before = len(self.conductors[0].decisions), self.last_decision(0)
        commands, expected = (one.handle(event, self.now) for one in self.conductors)
        assert commands == expected
        assert self.last_decision(0) == self.last_decision(1)
        assert self.conductors[0].refusals == self.conductors[1].refusals
        self.n_placed += (len(self.conductors[0].decisions), self.last_decision(0)) != before
        for command in commands:
            self.act(command)

    def last_decision(self, i: int) -> Any:
        decisions = self.conductors[i].decisions
        return decisions[-1] if decisions else None

    def act(self, command: AnyCommand) -> None:
        match command:
            case Send(message=Cancel(request_id=rid)):
                self.sent = [
                    one for one in self.sent if getattr(one.message, "request_id", None) != rid
                ]
                if command.worker_id.startswith("prefill"):
                    self.sent.append(command)
            case Send():
                self.sent.append(command)
            case Resubmit():
                before = self.requests.pop(command.request_id)
                casualties = before.casualties
                if command.casualty is not None:
                    casualties = with_casualty(casualties, command.casualty)
                again: dict[str, Any] = {"attempt": before.attempt + 1, "casualties": casualties}
                again["request_id"] = retry_id(before.request_id, before.attempt + 1)
                again["fruitless"] = before.fruitless + 1
                self.arrive(msgspec.structs.replace(before, **again))
            case Reject() | Fail():
                self.requests.pop(command.request_id, None)

    # -- what happens ------------------------------------------------------------------------

    def step(self) -> None:
        dice = self.dice
        roll = dice.random()
        if roll < 0.35:
            self.arrive(self.a_new_request())
        elif roll < 0.7 and self.sent:
            self.answer(self.sent.pop(dice.randrange(len(self.sent))))
        elif roll < 0.78 and self.decoding:
            self.end_decode(self.decoding.pop(dice.randrange(len(self.decoding))))
        elif roll < 0.88:
            self.report()
        elif roll < 0.91:
            self.join(dice.choice(self.names))
        elif roll < 0.92:
            self.lose(dice.choice(self.names))
        elif roll < 0.93 and self.requests:
            rid = dice.choice(list(self.requests))
            self.requests.pop(rid)
            self.handle(RequestCancelled(rid))
        else:
            self.now += dice.choice((0.0, 0.001, 0.1, 0.1, 1.0, 7.0))
            self.handle(Tick())

    def a_new_request(self) -> Request:
        dice = self.dice
        return a_request(
            f"cmpl-{len(self.requests)}-{self.sequence}-{self.n_placed}-{dice.random()}",
            n_tokens=dice.choice(LENGTHS),
            prompt=dice.randrange(N_PROMPTS),
            max_new_tokens=dice.choice((1, 8, 40)),
            priority=dice.choice(self.priorities),
            ttft_slo_s=dice.choice((None, None, 1.0)),
            tbt_slo_s=dice.choice((None, None, 0.1)),
        )

    def arrive(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.handle(RequestArrived(request))

    def hear(self, worker_id: WorkerId, message: ToConductor) -> None:
        self.handle(MessageReceived(worker_id, message))

    def answer(self, sent: Send) -> None:
        dice, worker_id, message = self.dice, sent.worker_id, sent.message
        fails = dice.random() < 0.1
        culprit = WorkerId(dice.choice(self.names)) if dice.random() < 0.5 else None
        blamed: dict[str, Any] = {"reason": "no", "retryable": True, "culprit": culprit}
        match message:
            case ReserveDecode(request_id=rid) if fails:
                self.hear(worker_id, DecodeRefused(request_id=rid, reason="full", retryable=True))
            case ReserveDecode(request_id=rid):
                landing = a_landing(worker_id)
                self.hear(
                    worker_id, DecodeReserved(request_id=rid, landing=landing, expires_s=60.0)
                )
            case StartPrefill(request_id=rid) if fails:
                self.hear(worker_id, PrefillFailed(request_id=rid, **blamed))
            case StartPrefill(request_id=rid):
                cached = message.cached
                n_cached = 0 if cached is None else 16 * cached.n_blocks
                self.now += dice.choice((0.0, 0.01, 0.5))
                read = {
                    "compute_s": dice.choice((0.01, 0.3, 2.0, 2000.0)),
                    "fetched_bytes": dice.choice((0, 1 << 20)) if n_cached else 0,
                    "fetch_s": 60.0 if worker_id[-1] in "02468" else 600.0,
                }
                self.hear(worker_id, prefill_done(rid, n_cached=n_cached, **read))
                if message.store_in is not None:
                    self.store(message.store_in.worker_id, message)
            case StartDecode(request_id=rid) if fails:
                self.hear(worker_id, DecodeFailed(request_id=rid, **blamed))
            case StartDecode(request_id=rid):
                self.decoding.append(rid)
            case Cancel(request_id=rid):
                self.hear(worker_id, PrefillStopped(request_id=rid))

    def store(self, kvstore: WorkerId, start: StartPrefill) -> None:
        self.sequence += 1
        self.handle(KvChanged(kvstore, kv_stored(start.block_hashes, self.sequence)))

    def end_decode(self, rid: RequestId) -> None:
        if self.requests.pop(rid, None) is not None:
            self.handle(RequestFinished(rid, 8))

    def report(self) -> None:
        dice, worker_id = self.dice, WorkerId(self.dice.choice(self.names))
        if worker_id.startswith("prefill"):
            n = dice.choice((0, 0, 50, 5000))
            self.hear(worker_id, prefill_load(n, n))
        elif worker_id.startswith("decode"):
            n = dice.choice((0, 1, 3))
            free_pages, step_s = dice.choice((0, 3, 20, 64)), dice.choice((0.0, 0.01, 0.03))
            load = decode_load(free_pages, n_running=n, context_tokens=100 * n, step_s=step_s)
            self.hear(worker_id, load)
        else:
            hashes = a_request(n_tokens=330, prompt=dice.randrange(N_PROMPTS)).block_hashes
            held = hashes[: dice.randrange(len(hashes))]
            self.hear(worker_id, BlocksSnapshot(sequence=self.sequence, hashes=held))

    def lose(self, name: str) -> None:
        self.sent = [one for one in self.sent if one.worker_id != name]
        self.handle(WorkerLost(WorkerId(name), "its lease ran out"))

    def join(self, name: str) -> None:
        self.handle(WorkerJoined(self.a_worker(name)))

    def a_worker(self, name: str) -> WorkerInfo:
        dice, role = self.dice, name.split("-")[0]
        odd = dice.random() < 0.05
        stage = None
        if self.grouped and role == "prefill":
            number = int(name.split("-")[1])
            stage = Stage(f"group-{number // 2}", number % 2, 2, chunk_tokens=32)
        times = (1.0,) if self.alike else (0.5, 1.0, 1.01, 4.0)
        return a_worker(
            name,
            host=dice.choice(("a", "b")),
            n_blocks=8 if odd else 64,
            max_context=120 if odd else 4096,
            draining=dice.random() < 0.08,
            home_kvstore=dice.choice((None, "kvstore-0", "kvstore-1")),
            replicates=True,
            keeps_pages=dice.random() < 0.7,
            skips_held_blocks=dice.random() < 0.7,
            stage=stage,
            stage_layers_only=stage is not None and dice.random() < 0.3,
            local_prefill_tokens=dice.choice((50, 4096)) if self.local and role == "decode" else 0,
            local_prefill_step_s=dice.choice((0.0, 0.05)),
            local_prefill_tbt_s=dice.choice((0.0, 0.02)),
            prefill_cost=PrefillCost(
                dice.choice(times) * 0.01, dice.choice(times) * 1e-3, dice.choice((0.0, 1e-5))
            )
            if role == "prefill"
            else None,
            decode_cost=DecodeCost(0.01, dice.choice(times) * 1e-3, dice.choice((0.0, 1e-6, 2e-6)))
            if role == "decode"
            else None,
        )


@pytest.mark.timeout(300 + N_CLUSTERS // 2)  # ten thousand take minutes
@pytest.mark.random_seeds(1)
def test_the_order_decides_as_the_comparison_of_all_workers(seed: int) -> None:
    first = int(os.environ.get("HALFMOON_RANDOM_SEED", seed))
    for number in range(first, first + N_CLUSTERS):
        try:
            play(number)
        except BaseException as error:
            error.add_note(f"again: HALFMOON_RANDOM_SEED={number} HALFMOON_RANDOM_CLUSTERS=1")
            raise
    print(f"clusters {first} to {first + N_CLUSTERS - 1} decide alike")


def play(seed: int) -> None:
    """Play one random cluster."""
    dice = random.Random(-1 - seed)
    longest_block, n_rows = dice.choice((4, 192)), dice.choice((1, 2, 8))
    with (
        mock.patch.multiple(linear_order, _LONG=longest_block, _SHORT=longest_block // 4),
        mock.patch.object(ordered_placement, "KEPT_ROWS", n_rows),
    ):
        pair = Pair(seed)
        for name in pair.names:
            pair.join(name)
        for _ in range(150):
            pair.step()
        for conductor in pair.conductors:
            conductor.check()


@pytest.mark.parametrize("placement", list(PLACEMENT_MODES))
def test_neither_a_try_that_avoids_a_worker_nor_any_mode_compares_all_workers(
    placement: str,
) -> None:
    workers = (*(f"prefill-{i:03}" for i in range(300)), "decode-0", "decode-1", "kvstore-0")
    core = Core(placement=placement)
    for name in workers:
        core.conductor.handle(WorkerJoined(a_worker(name)), 0.0)
    first = a_request("cmpl-1")
    core.arrive(first)
    used = core.placement
    assert used.decode is not None
    with mock.patch.object(placer, "place", side_effect=AssertionError("compares all workers")):
        for worker_id in (used.prefill, used.decode):
            core.conductor._placer.avoid(first.request_id, worker_id)
        again_id = retry_id(first.request_id, 2)
        retry = msgspec.structs.replace(first, request_id=again_id, attempt=2, fruitless=1)
        core.conductor.handle(RequestArrived(retry), 0.0)
    again = core.placement
    assert again.n_candidates == 299
    assert len(again.estimates) >= ordered_placement.KEPT_ROWS
    assert used.prefill not in (again.prefill, *(row.worker_id for row in again.estimates))
    assert again.decode not in (None, used.decode)


def test_a_request_goes_where_the_least_is_before_it_in_the_order_of_priorities() -> None:
    core = Core(placement="load_balance")
    for name in ("prefill-0", "prefill-1", "decode-0", "kvstore-0"):
        core.join(name, prefill_cost=PrefillCost(0.0, 0.01), n_blocks=999)
    for name, n_tokens, priority, placed in (
        ("long", 1000, 0, ("prefill-0", 0.0)),
        ("urgent", 100, 1, ("prefill-0", 0.0)),
        ("urgent too", 100, 1, ("prefill-1", 0.0)),
        ("urgent as well", 100, 1, ("prefill-0", 1.0)),
        ("late", 100, 0, ("prefill-1", 1.0)),
        ("most urgent", 100, 2, ("prefill-0", 0.0)),
    ):
        core.arrive(name, n_tokens=n_tokens, priority=priority)
        assert (core.chosen.worker_id, core.chosen.queue_s) == placed, name
