"""Requests without a limit: placed by what they need now, cut where a worker has no more pages."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.commands import AnyCommand, Reject, Resubmit
from halfmoon_scheduling.events import RequestFinished
from halfmoon_scheduling.placement.worker_limits import OPEN_END_ROOM_TOKENS
from tests.scheduling.core import D0, D1, P0, R1, Core, message_to, only

SMALL, LARGE = 200, 4096
SIZE = 16


class Pool(Core):
    """A conductor with a small and, if asked, a large decode worker."""

    def __init__(self, *n_blocks: int) -> None:
        super().__init__()
        self.join("prefill-0", n_blocks=LARGE, max_context=131_072)
        for i, n in enumerate(n_blocks):
            self.join(f"decode-{i}", n_blocks=n, max_context=131_072)

    def come(
        self, max_new: int, rid: str = R1, n_tokens: int = 40, **more: Any
    ) -> list[AnyCommand]:
        return self.arrive(rid, n_tokens=n_tokens, max_new_tokens=max_new, **more)

    def serve(self, decode: str = "decode-0") -> tuple[Any, Any]:
        """Grant the pages, prefill, and return what prefill and decode are told."""
        start = message_to(self.reserved(decode), P0)
        return start, message_to(self.prefilled(), decode)


def test_an_open_end_may_go_to_a_worker_that_cannot_hold_it_at_its_longest() -> None:
    core = Pool(SMALL, LARGE)
    # The large one has a request already.
    core.come(4000, "other")
    reserve = message_to(core.come(60_000, open_end=True), D0)
    assert reserve.stopping.max_new_tokens == SMALL * SIZE + 1 - 40
    prefill, decode = core.serve()
    assert prefill.stopping == decode.stopping == reserve.stopping


def test_a_limit_of_the_client_is_placed_where_all_of_it_fits_or_refused() -> None:
    core = Pool(SMALL, LARGE)
    assert message_to(core.come(60_000), D1).stopping.max_new_tokens == 60_000
    refused = only(Pool(SMALL).come(60_000), Reject)
    assert refused.kind == "too_long"
    assert "ask for fewer new tokens" in refused.reason and "--pool-mib" in refused.reason


def test_an_answer_that_was_cut_is_tried_again_and_goes_where_it_fits() -> None:
    core = Pool(SMALL, LARGE)
    core.come(4000, "other")
    core.come(60_000, open_end=True)
    core.serve()
    n_new = SMALL * SIZE + 1 - 40
    assert only(core.handle(RequestFinished(R1, n_new, is_cut=True)), Resubmit).request_id == R1
    again = core.come(60_000 - n_new, "cmpl-1~2", 40 + n_new, open_end=True, attempt=2)
    assert message_to(again, D1).stopping.max_new_tokens == 60_000 - n_new


@pytest.mark.parametrize("n_new", [3, OPEN_END_ROOM_TOKENS + 500])
@pytest.mark.parametrize("open_end", [True, False])
def test_an_answer_is_charged_what_it_took_whatever_it_declared(n_new: int, open_end: bool) -> None:
    core = Pool(LARGE)
    core.come(50_000, open_end=open_end, tenant="a")
    core.serve()
    core.finish(n_new=n_new)
    core.come(8, "next", tenant="a")
    assert core.conductor._table[RequestId("next")].fair.finish == 40 + n_new + 48


def test_a_request_that_is_refused_costs_its_tenant_no_share() -> None:
    core = Pool(LARGE)
    core.come(8, tenant="a")
    for n in range(3):
        core.come(8, f"refused-{n}", 140_000, tenant="a")
    core.come(8, "next", tenant="a")
    assert core.conductor._table[RequestId("next")].fair.finish == 2 * 48
