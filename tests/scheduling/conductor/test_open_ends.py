"""Requests without a limit: placed by what they need now, cut where a worker has no more pages."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    DecodeReserved,
    ReserveDecode,
    StartDecode,
    StartPrefill,
)
from halfmoon_scheduling.commands import AnyCommand, Reject, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
)
from halfmoon_scheduling.placement.worker_limits import OPEN_END_ROOM_TOKENS
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

R1 = RequestId("cmpl-1")
SMALL, LARGE = 200, 4096
SIZE = 16


class Core:
    """A conductor with a small and, if asked, a large decode worker; it audits itself."""

    def __init__(self, *n_blocks: int) -> None:
        self.conductor = Conductor(SchedulingConfig())
        self.handle(WorkerJoined(a_worker("prefill-0", n_blocks=LARGE, max_context=131_072)))
        for i, n in enumerate(n_blocks):
            self.handle(WorkerJoined(a_worker(f"decode-{i}", n_blocks=n, max_context=131_072)))

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, 0.0)
        self.conductor.check()
        return commands

    def arrive(self, **fields: Any) -> list[AnyCommand]:
        return self.handle(RequestArrived(a_request(**fields)))

    def messages(self, decode: str) -> list[Any]:
        """Grant the pages, prefill, and return what prefill and decode are told."""
        granted = DecodeReserved(request_id=R1, landing=a_landing(decode), expires_s=60.0)
        sent = self.handle(MessageReceived(WorkerId(decode), granted))
        sent += self.handle(MessageReceived(WorkerId("prefill-0"), a_prefill_done()))
        return [command.message for command in sent if isinstance(command, Send)]


def reserve_of(commands: list[AnyCommand]) -> tuple[WorkerId, ReserveDecode]:
    (command,) = commands
    assert isinstance(command, Send) and isinstance(command.message, ReserveDecode), command
    return command.worker_id, command.message


def test_an_open_end_may_go_to_a_worker_that_cannot_hold_it_at_its_longest() -> None:
    core = Core(SMALL, LARGE)
    # The large one has a request already.
    core.arrive(request_id="other", n_tokens=40, max_new_tokens=4000)
    worker, reserve = reserve_of(core.arrive(n_tokens=40, max_new_tokens=60_000, open_end=True))
    assert worker == "decode-0"
    assert reserve.stopping.max_new_tokens == SMALL * SIZE + 1 - 40
    prefill, decode = core.messages("decode-0")
    assert isinstance(prefill, StartPrefill) and prefill.stopping == reserve.stopping
    assert isinstance(decode, StartDecode) and decode.stopping == reserve.stopping


def test_a_limit_of_the_client_is_placed_where_all_of_it_fits_or_refused() -> None:
    core = Core(SMALL, LARGE)
    worker, reserve = reserve_of(core.arrive(n_tokens=40, max_new_tokens=60_000))
    assert (worker, reserve.stopping.max_new_tokens) == ("decode-1", 60_000)
    (refused,) = Core(SMALL).arrive(n_tokens=40, max_new_tokens=60_000)
    assert isinstance(refused, Reject) and refused.kind == "too_long"
    assert "ask for fewer new tokens" in refused.reason and "--pool-mib" in refused.reason


def test_an_answer_that_was_cut_is_tried_again_and_goes_where_it_fits() -> None:
    core = Core(SMALL, LARGE)
    core.arrive(request_id="other", n_tokens=40, max_new_tokens=4000)
    core.arrive(n_tokens=40, max_new_tokens=60_000, open_end=True)
    core.messages("decode-0")
    n_new = SMALL * SIZE + 1 - 40
    (again,) = core.handle(RequestFinished(R1, n_new, is_cut=True))
    assert isinstance(again, Resubmit) and again.request_id == R1
    worker, reserve = reserve_of(
        core.arrive(
            request_id="cmpl-1~2",
            n_tokens=40 + n_new,
            max_new_tokens=60_000 - n_new,
            open_end=True,
            attempt=2,
        )
    )
    assert (worker, reserve.stopping.max_new_tokens) == ("decode-1", 60_000 - n_new)


def test_an_answer_that_ends_by_itself_is_over() -> None:
    core = Core(SMALL)
    core.arrive(n_tokens=40, max_new_tokens=2000, open_end=True)
    core.messages("decode-0")
    assert core.handle(RequestFinished(R1, 12)) == []
    assert core.conductor.is_idle


@pytest.mark.parametrize("n_new", [3, OPEN_END_ROOM_TOKENS + 500])
@pytest.mark.parametrize("open_end", [True, False])
def test_an_answer_is_charged_what_it_took_whatever_it_declared(n_new: int, open_end: bool) -> None:
    core = Core(LARGE)
    core.arrive(n_tokens=40, max_new_tokens=50_000, open_end=open_end, tenant="a")
    core.messages("decode-0")
    core.handle(RequestFinished(R1, n_new))
    core.arrive(request_id="next", n_tokens=40, max_new_tokens=8, tenant="a")
    state = core.conductor._table[RequestId("next")]
    assert state.fair.finish == 40 + n_new + 48


def test_a_request_that_is_refused_costs_its_tenant_no_share() -> None:
    core = Core(LARGE)
    core.arrive(n_tokens=40, max_new_tokens=8, tenant="a")
    for n in range(3):
        core.arrive(request_id=f"refused-{n}", n_tokens=140_000, max_new_tokens=8, tenant="a")
    core.arrive(request_id="next", n_tokens=40, max_new_tokens=8, tenant="a")
    assert core.conductor._table[RequestId("next")].fair.finish == 2 * 48
