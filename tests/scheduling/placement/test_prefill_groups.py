"""Groups of prefill workers, from their records to the messages that follow.

A prompt token takes 10 ms; groups cut prompts into chunks of 32 tokens.
"""

from typing import Any

import pytest

from halfmoon_protocol.messages import (
    Cancel,
    PrefillCost,
    Stage,
    StageAddress,
    StartDecode,
    StartPrefill,
)
from halfmoon_scheduling.commands import AnyCommand, Resubmit, Send
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate, complete_groups
from halfmoon_testing.scheduling_inputs import a_landing, a_request, a_worker
from tests.scheduling.core import D0, P0, P1, P2, R1, Core, message_to, resubmitted, sent

COST = PrefillCost(c0_s=0.0, c1_s=0.01, c2_s=0.0)
SLOW = PrefillCost(c0_s=0.0, c1_s=1.0, c2_s=0.0)
IN_DOUBT = Send(D0, Cancel(request_id=R1, landing_in_doubt=True))


def stage(index: int, *, n_stages: int = 2, group: str = "g", **changes: Any) -> Stage:
    return Stage(group, index, n_stages, **{"chunk_tokens": 32, **changes})


def run(index: int, first_layer: int, n_layers: int) -> Stage:
    return stage(index, first_layer=first_layer, n_layers=n_layers)


class Group(Core):
    """Two stages, one decode worker, and more prefill workers if asked."""

    def __init__(self, *, n_prefill: int = 2, **config: Any) -> None:
        super().__init__(**{"placement": "min_ttft", **config})
        for index in range(n_prefill):
            self.prefill(index, stage=stage(index) if index < 2 else None)
        self.join("decode-0", n_blocks=512)

    def prefill(self, index: int, **fields: Any) -> None:
        self.join(f"prefill-{index}", **{"prefill_cost": COST, "n_blocks": 128, **fields})

    def come(self, rid: str = "cmpl-1", n_tokens: int = 640, **fields: Any) -> Any:
        """The row that was chosen."""
        self.arrive(rid, n_tokens=n_tokens, **fields)
        return self.chosen

    def lands(self) -> list[AnyCommand]:
        return self.reserved(landing=a_landing("decode-0", tuple(range(40))))

    def prefilling(self) -> StartPrefill:
        """A long prompt has come so far that the group computes it."""
        self.come()
        message = message_to(self.lands(), P0)
        assert isinstance(message, StartPrefill)
        return message

    @property
    def groups(self) -> set[str]:
        """The groups that were compared."""
        return {getattr(row, "group", "") for row in self.placement.estimates} - {""}


def test_long_prompts_take_the_group_and_short_ones_one_worker() -> None:
    core = Group()
    core.come(n_tokens=640)  # 20 chunks: 6.4 s alone, 3.2 s and a half chunk together
    assert isinstance(core.chosen, GroupEstimate)
    assert (core.chosen.group, core.chosen.members) == ("g", (P0, P1))
    assert core.chosen.prefill_s == pytest.approx(3.2 + 0.16)
    core = Group()
    assert core.come(n_tokens=32).workers == (P0,)  # one chunk
    assert core.come("cmpl-2", n_tokens=40).workers == (P1,)  # 0.4 s alone, 0.36 s together


def test_a_stage_of_fewer_layers_is_busy_for_less_time_and_the_last_layer_costs_nothing() -> None:
    core = Group(n_prefill=0)
    core.prefill(0, stage=run(0, 0, 7))
    core.prefill(1, stage=run(1, 7, 9))
    # 6.4 s alone, in 20 chunks
    assert core.come().stage_s == pytest.approx((6.4 * 7 / 15, 0.32 * 7 / 15 + 6.4 * 8 / 15))


@pytest.mark.parametrize("placement", ["min_ttft", "kvcache_centric", "load_balance", "random"])
def test_a_member_with_one_stages_layers_alone_takes_no_prompt_by_itself(placement: str) -> None:
    core = Group(n_prefill=3, placement=placement)
    for index in range(2):
        core.prefill(index, stage=stage(index), stage_layers_only=True)
    for number in range(4):
        assert core.come(f"cmpl-short-{number}", n_tokens=32).workers == (P2,)
    if placement == "min_ttft":
        assert core.come().workers == (P0, P1)
    if placement in ("load_balance", "random"):  # they compare no times, so they use no groups
        assert not isinstance(Group(placement=placement).come(), GroupEstimate)


def test_a_group_with_a_part_too_small_for_a_prompt_is_passed_over() -> None:
    for n_blocks, n_workers in ((39, 1), (40, 2)):
        core = Group(n_prefill=3)
        core.prefill(1, stage=stage(1), stage_layers_only=True, n_blocks=n_blocks)
        assert len(core.come(n_tokens=640).workers) == n_workers


def test_parts_without_a_worker_of_all_layers_make_no_cluster_ready() -> None:
    core = Group()
    for index in range(2):
        core.prefill(index, stage=stage(index), stage_layers_only=True)
    assert core.conductor.cluster.accepting("prefill") == ()
    assert [group.name for group in core.conductor.cluster.groups] == ["g"]


def test_a_group_must_be_faster_by_a_factor() -> None:
    for least_gain, group in ((1.9, True), (1.91, False)):  # it is 6.4 / 3.36 = 1.905 times
        assert isinstance(Group(group_least_gain=least_gain).come(), GroupEstimate) == group
    # One chunk: nothing is gained at all.
    assert Group(group_least_gain=1.0).come(n_tokens=32).workers == (P0,)


def test_a_group_is_as_busy_as_its_busiest_member() -> None:
    core = Group(n_prefill=3)
    core.prefill(0, prefill_cost=SLOW, stage=stage(0))
    core.prefill(2, prefill_cost=SLOW)
    assert core.come("cmpl-short", n_tokens=32).workers == (P1,)  # 0.32 s
    core.prefill(0, stage=stage(0))
    core.come("cmpl-long")
    assert core.chosen.members == (P0, P1)
    assert core.chosen.queue_s == pytest.approx(0.32)


def test_every_member_is_busy_for_its_stage_and_free_when_it_is_over() -> None:
    core = Group()
    core.prefilling()
    queues_s = core.conductor.cluster.prefills.queues_s(core.now)
    assert queues_s == {P0: pytest.approx(3.2), P1: pytest.approx(3.36)}
    core.now = 3.4
    assert sent(core.prefilled(compute_s=1.0)) == [(D0, StartDecode)]
    assert core.conductor.cluster.prefills.queues_s(core.now) == {P0: 0.0, P1: 0.0}


def test_the_first_stage_is_told_who_the_others_are() -> None:
    start = Group().prefilling()
    assert start.stages == (StageAddress(P1, 1, "memory://prefill-1/commands"),)
    core = Group()
    core.come(n_tokens=16)
    assert message_to(core.lands(), P0).stages == ()


@pytest.mark.parametrize("changed", [{"stage": None}, {"draining": True, "stage": stage(1)}])
def test_a_group_takes_work_only_while_all_its_stages_do(changed: dict[str, Any]) -> None:
    core = Group()
    core.prefill(1, **changed)
    assert not isinstance(core.come(), GroupEstimate)
    core.prefill(1, stage=stage(1))
    core.come("cmpl-2")
    assert core.groups == {"g"}


def test_of_two_workers_with_one_stage_the_other_stands_in_when_the_first_is_lost() -> None:
    infos = [
        a_worker(f"prefill-{i}", stage=stage(index), prefill_cost=COST)
        for i, index in enumerate((0, 1, 1))
    ]
    (group,) = complete_groups(infos)
    assert group.members == (P0, P1)
    (group,) = complete_groups([infos[0], infos[2]])
    assert group.members == (P0, P2)


@pytest.mark.parametrize(
    ("stages", "fault"),
    [
        ([stage(0), stage(1)], ""),
        ([stage(0), stage(1), stage(1)], ""),  # a spare
        ([stage(0)], "of its 2 stages, no worker is stage 1"),
        ([stage(1, n_stages=4)], "of its 4 stages, no worker is stage 0, 2, 3"),
        ([stage(0), stage(0)], "prefill-0 and prefill-1 both say that they are stage 0"),
        ([stage(0), stage(2, n_stages=3)], "has 2 stages, prefill-1 says 3: start all members"),
        ([stage(0), stage(5)], "prefill-1 says that it is stage 5 of 2"),
        ([run(0, 0, 7), run(1, 7, 9)], ""),
        (
            [run(0, 0, 8), run(1, 7, 9)],
            "stage 1 at prefill-1 begins with layer 7, prefill-0 ends with layer 7",
        ),
        ([run(0, 0, 6), run(1, 7, 9)], "begins with layer 7, prefill-0 ends with layer 5"),
        ([run(0, 1, 7), run(1, 8, 8)], "stage 0 at prefill-0 begins with layer 1, the model"),
        ([run(0, 0, 8), stage(1)], "prefill-1 does not say which layers it has, other members do"),
        ([stage(0, n_stages=256)], "no worker is stage 1, 2, 3, 4, 5, 6, 7, 8, …"),
    ],
)
def test_a_group_with_missing_double_or_contradicting_stages_is_named_and_single_members_go_on(
    stages: list[Stage], fault: str
) -> None:
    core = Group(n_prefill=0)
    for index, each in enumerate(stages):
        core.prefill(index, stage=each)
    faults = core.conductor.cluster.group_faults
    if fault:
        assert list(faults) == ["g"] and fault in faults["g"]
    else:
        assert faults == {}
    assert isinstance(core.come(), GroupEstimate) == (not fault)


def test_a_cached_prefix_shortens_the_rest_and_goes_to_the_other_stages() -> None:
    core = Group(prior_bandwidth=1024.0, group_least_gain=1.0)
    core.join("kvstore-0", prefill_cost=COST, n_blocks=128)
    core.hold("kvstore-0", a_request(n_tokens=640), 4)
    core.come()
    assert core.chosen.n_blocks == 4
    assert core.chosen.transfer_s == pytest.approx(4 * 1024 / 2 / 1024)  # half of it to stage 1
    assert core.chosen.prefill_s == pytest.approx((640 - 64) * 0.005 + 0.16)


# -- what can go wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["prefill-0", "prefill-1"])
def test_a_prompt_whose_group_loses_a_member_is_tried_again(lost: str) -> None:
    core = Group(n_prefill=3)
    core.prefilling()
    commands = core.lose(lost)
    assert resubmitted(commands) == [R1]
    # Of the first stage nobody is left who could say when it has stopped.
    told = IN_DOUBT if lost == "prefill-0" else Send(P0, Cancel(request_id=R1))
    assert [command for command in commands if isinstance(command, Send)] == [told]
    assert not isinstance(core.come("cmpl-1~2", attempt=2), GroupEstimate)


def test_what_a_lost_stage_wrote_stays_in_doubt_when_the_first_one_has_stopped() -> None:
    for stopping in (False, True):
        core = Group()
        core.prefilling()
        if stopping:
            assert core.cancel() == [Send(P0, Cancel(request_id=R1))]
        core.lose("prefill-1")
        assert core.prefill_stopped() == [IN_DOUBT]


def test_a_group_that_has_stopped_in_time_leaves_no_doubt() -> None:
    core = Group()
    core.prefilling()
    core.cancel()
    assert core.prefill_stopped() == [Send(D0, Cancel(request_id=R1))]
    assert core.conductor.cluster.prefills.queues_s(core.now) == {P0: 0.0, P1: 0.0}


def test_a_group_that_answers_nobody_is_given_up_after_its_time() -> None:
    core = Group(request_timeout_s=30.0)
    core.prefilling()
    commands = core.tick(31.0)
    assert Send(P0, Cancel(request_id=R1)) in commands
    assert any(isinstance(command, Resubmit) for command in commands)


def test_a_request_that_failed_at_a_stage_is_not_given_to_its_group_again() -> None:
    core = Group()
    core.prefilling()
    core.prefill_failed(reason="stage 1 is silent", culprit=P1)
    assert core.come("cmpl-1~2", attempt=2).workers == (P0,)
    core.come("cmpl-2", prompt=1)
    assert core.groups == {"g"}
