"""A conductor that tells workers to change sides, by the loads it knows."""

from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import ChangeRole, DecodeLoad, PrefillLoad, Role, WorkerInfo
from halfmoon_scheduling.commands import Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import MessageReceived, Tick, WorkerJoined
from halfmoon_testing.scheduling_inputs import a_worker

BOTH: tuple[Role, ...] = ("prefill", "decode")
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1", "decode-2")


def worker(name: str, **fields: Any) -> WorkerInfo:
    return msgspec.structs.replace(a_worker(name), **fields)


class Core:
    """Two prefill and three decode workers, whose work comes from another conductor."""

    def __init__(
        self,
        *,
        roles: tuple[Role, ...] = BOTH,
        switched_on: bool = True,
        local_tokens: int = 0,
    ) -> None:
        self.now = 0.0
        self.core = Conductor(
            SchedulingConfig(
                ttft_slo_s=1.0,
                tbt_slo_s=0.1,
                role_changes=switched_on,
                role_lasting_s=20.0,
                role_rest_s=50.0,
            )
        )
        for name in (*PREFILLS, *DECODES):
            local = local_tokens if name in DECODES else 0
            info = worker(name, roles=roles, local_prefill_tokens=local)
            self.core.handle(WorkerJoined(info), 0.0)

    def prefill_load(self, queued_tokens: int) -> None:
        for name in PREFILLS:
            load = PrefillLoad(n_queued=1, queued_tokens=queued_tokens, free_pages=1, n_pages=1)
            self.core.handle(MessageReceived(WorkerId(name), load), self.now)

    def decode_load(self, free_pages: int) -> None:
        for name in DECODES:
            load = DecodeLoad(
                n_running=1, n_reserved=0, context_tokens=1, free_pages=free_pages,
                n_pages=64, step_s=0.0,
            )  # fmt: skip
            self.core.handle(MessageReceived(WorkerId(name), load), self.now)

    def told_by(self, until_s: float) -> list[tuple[float, WorkerId, Role]]:
        """Who is told to change, with a tick every tenth of a second."""
        told = []
        while self.now < until_s:
            self.now = round(self.now + 0.1, 1)
            for command in self.core.handle(Tick(), self.now):
                if isinstance(command, Send) and isinstance(command.message, ChangeRole):
                    told.append((self.now, command.worker_id, command.message.role))
        self.core.check()
        return told


def test_a_worker_of_the_idle_side_is_told_and_then_there_is_a_rest() -> None:
    core = Core()
    core.prefill_load(100_000)
    told = core.told_by(100.0)
    assert [(name, role) for _, name, role in told] == [("decode-0", "prefill")] * 2
    first_s, second_s = (at_s for at_s, _, _ in told)
    assert first_s >= 20.0 and second_s >= first_s + 50.0


def test_decode_is_busy_when_its_pages_are_gone_though_steps_are_short() -> None:
    core = Core()
    core.decode_load(free_pages=2)
    assert [(name, role) for _, name, role in core.told_by(40.0)] == [("prefill-0", "decode")]


def test_workers_with_short_queues_that_are_never_empty_are_not_spared() -> None:
    core = Core()
    core.prefill_load(1)
    core.told_by(60.0)  # long enough to be known as busy; nobody is short of workers
    core.decode_load(free_pages=2)
    assert core.told_by(120.0) == []
    core.prefill_load(0)
    assert {role for _, _, role in core.told_by(240.0)} == {"decode"}


@pytest.mark.parametrize("off", ["by its settings", "by the workers' records"])
def test_nobody_is_told_unless_both_sides_want_it(off: str) -> None:
    core = Core(switched_on=False) if off == "by its settings" else Core(roles=())
    core.prefill_load(100_000)
    assert core.told_by(100.0) == []


def test_who_is_on_the_way_out_belongs_to_no_side() -> None:
    core = Core()
    core.prefill_load(100_000)
    ((_, leaver, _),) = core.told_by(40.0)
    core.core.handle(WorkerJoined(worker(leaver, draining=True, roles=BOTH)), core.now)
    ((_, next_one, _),) = core.told_by(100.0)
    assert next_one not in (leaver, *PREFILLS)


def test_a_worker_that_is_back_in_another_role_is_of_that_side() -> None:
    core = Core()
    info = worker("decode-0", role="prefill", generation=2, roles=BOTH)
    core.core.handle(WorkerJoined(info), 0.0)
    assert {i.worker_id for i in core.core.cluster.accepting("prefill")} == {
        *PREFILLS,
        "decode-0",
    }
    core.core.check()


@pytest.mark.parametrize(("local_tokens", "told"), [(4096, {"decode"}), (4095, set())])
def test_prefill_workers_with_work_are_spared_where_decode_workers_take_any_prompt(
    local_tokens: int, told: set[str]
) -> None:
    core = Core(local_tokens=local_tokens)  # the longest context is 4,096 tokens
    core.prefill_load(1)
    core.told_by(60.0)
    core.decode_load(free_pages=2)
    assert {role for _, _, role in core.told_by(120.0)} == told
