"""A tenant that floods decode with long prompts or answers makes room for others."""

import pytest

from halfmoon_protocol.ids import RequestId, retry_id
from halfmoon_protocol.messages import Cancel, ReserveDecode, StartDecode
from halfmoon_scheduling.commands import AnyCommand, Fail, Resubmit, Send
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.requests.request_state import Phase
from tests.scheduling.core import D0, P0, Core, asked, resubmitted, sent

#: Of a prompt of 160 tokens.
N_PAGES = 10


class Flooded(Core):
    """A conductor with workers that grant all they are asked for."""

    def __init__(self, **config: bool) -> None:
        super().__init__("prefill-0", "decode-0", **config)

    def come(self, name: str, tenant: str, max_new: int = 800, **fields: int) -> list[AnyCommand]:
        return self.arrive(name, n_tokens=160, max_new_tokens=max_new, tenant=tenant, **fields)

    def honest(self, **fields: int) -> list[AnyCommand]:
        """A small request of another tenant comes."""
        return self.come("honest", "lab", max_new=8, **fields)

    def start(self, name: str) -> None:
        """Grant its pages, prefill it, and start it."""
        self.reserved(rid=name)
        assert (D0, StartDecode) in sent(self.prefilled(rid=name))

    def flood(self, *, priority: int = 0) -> None:
        """Fill decode with answers of a tenant."""
        for i in range(6):
            assert list(asked(self.come(f"flood-{i}", "flood", priority=priority)))
            self.start(f"flood-{i}")

    def flood_prompts(self, *, fruitless: int = 0) -> None:
        """Fill decode with prompts that are being prefilled; the last one is a retry, maybe."""
        names = [f"flood-{i}" for i in range(5)] + [f"flood-5~{fruitless + 1}"]
        for name, n in zip(names, (0, 0, 0, 0, 0, fruitless), strict=True):
            assert list(asked(self.come(name, "flood", attempt=n + 1, fruitless=n))) == [name]
            self.reserved(rid=name)

    def reports(self, free_pages: int = 0) -> list[AnyCommand]:
        return self.load(free_pages=free_pages, n_running=6, context_tokens=960, step_s=0.01)


def stopped(commands: list[AnyCommand]) -> list[RequestId]:
    """Requests that are cancelled at a worker and placed again."""
    messages = [c.message for c in commands if isinstance(c, Send)]
    cancelled = [m.request_id for m in messages if isinstance(m, Cancel)]
    assert cancelled == resubmitted(commands)
    return cancelled


def test_the_newest_answer_of_a_flood_makes_room_for_another_tenant() -> None:
    core = Flooded()
    core.flood()
    commands = core.honest()
    assert stopped(commands) == ["flood-5"]
    assert list(asked(commands)) == ["honest"]
    kinds = [kind for _, kind in sent(commands)]
    assert kinds == [Cancel, ReserveDecode], "the pages are free when they are asked for"


def test_what_was_stopped_waits_behind_the_tenant_and_before_its_own_backlog() -> None:
    core = Flooded()
    core.flood()
    core.come("waits", "flood")
    core.honest()
    core.start("honest")
    again = retry_id(RequestId("flood-5"), 2)
    assert not asked(core.come(again, "flood", attempt=2))
    assert list(asked(core.finish("honest"))) == [again]
    assert core.phase("waits") is Phase.WAITING


def test_without_another_tenant_nothing_is_stopped() -> None:
    core = Flooded()
    core.flood()
    assert core.come("one-more", "flood") == []
    assert core.phase("one-more") is Phase.WAITING


def test_tenants_with_about_as_many_requests_do_not_stop_each_other() -> None:
    core = Flooded()
    for i in range(3):
        for tenant in ("a", "b"):
            core.come(f"{tenant}-{i}", tenant)
            core.start(f"{tenant}-{i}")
    assert core.come("a-3", "a") == []
    assert core.come("b-3", "b") == []


@pytest.mark.parametrize(("n_new", "made_room"), [(800, 0), (3, 1)])
def test_a_tenant_that_has_used_its_share_of_the_queue_waits(n_new: int, made_room: int) -> None:
    """What counts is what its answers took, not what they were allowed."""
    core = Flooded()
    for i, tenant in enumerate(("other", *120 * ["lab"])):  # the first one has no credit
        core.come(f"own-{i}", tenant)
        core.start(f"own-{i}")
        core.finish(f"own-{i}", n_new)
    core.flood()
    # 115,200 tokens or 19,560, and the credit is 65,536.
    assert len(stopped(core.come("late", "lab"))) == made_room


@pytest.mark.parametrize(("of_flood", "of_lab", "made_room"), [(0, 0, 1), (1, 0, 0), (1, 1, 1)])
def test_an_answer_of_higher_priority_goes_on(of_flood: int, of_lab: int, made_room: int) -> None:
    core = Flooded()
    core.flood(priority=of_flood)
    assert len(stopped(core.honest(priority=of_lab))) == made_room


def test_another_answer_is_stopped_only_when_the_worker_has_reported_twice() -> None:
    core = Flooded()
    core.flood()
    assert len(stopped(core.honest())) == 1
    assert stopped(core.refused(rid="honest", retry_after_s=60.0)) == []
    assert stopped(core.reports()) == []
    assert stopped(core.reports()) == ["flood-4"]


def test_the_newest_prompt_of_a_flood_makes_room_when_its_prefill_has_stopped() -> None:
    core = Flooded()
    core.flood_prompts()
    commands = core.honest()
    assert stopped(commands) == ["flood-5~1"]
    assert [worker for worker, _ in sent(commands)] == [P0]
    assert not asked(commands), "prefill may still write into its pages"
    for _ in range(3):
        assert stopped(core.reports()) == [], "pages are about to come free"
    (freed,) = core.prefill_stopped(rid="flood-5~1")
    assert freed == Send(D0, Cancel(request_id=RequestId("flood-5~1")))
    assert list(asked(core.reports(N_PAGES + 1))) == ["honest"]


def test_another_prompt_is_stopped_only_after_two_reports_without_the_first_ones_pages() -> None:
    core = Flooded()
    core.flood_prompts()
    core.honest()
    core.reports()
    core.reports()
    core.prefill_stopped(rid="flood-5~1")
    assert stopped(core.refused(rid="honest", retry_after_s=60.0)) == []
    assert stopped(core.reports()) == []
    assert stopped(core.reports()) == ["flood-4"]


def test_nothing_is_stopped_where_a_cancelled_prompt_frees_its_pages() -> None:
    core = Flooded()
    core.flood_prompts()
    core.cancel("flood-2")
    assert core.honest() == []
    assert list(asked(core.prefill_stopped(rid="flood-2"))) == ["honest"]


def test_a_prompt_that_was_stopped_has_not_failed_however_often() -> None:
    core = Flooded()
    core.flood_prompts(fruitless=SchedulingConfig().max_attempts - 1)
    (again,) = (c for c in core.honest() if isinstance(c, Resubmit | Fail))
    assert isinstance(again, Resubmit) and not again.counts


def test_a_worker_that_comes_back_has_stopped_nothing() -> None:
    core = Flooded()
    core.flood()
    core.honest()
    core.lose("decode-0")
    core.join("decode-0", generation=2)
    core.flood()
    assert len(stopped(core.come("again", "lab", max_new=8))) == 1


def test_it_can_be_switched_off() -> None:
    core = Flooded(shares_decode=False)
    core.flood()
    assert core.honest() == []
