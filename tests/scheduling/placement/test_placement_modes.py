"""What every placement mode promises and says of its choices, and a mode of one's own."""

from collections.abc import Iterator, Sequence

import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.placement.placement_explanations import (
    explain_placement,
    explain_rejected_candidate,
)
from halfmoon_scheduling.placement.placement_mode import (
    Choice,
    ModeSettings,
    PlacementMode,
    PrefixSource,
    TtftSlo,
)
from halfmoon_scheduling.registry import Registry
from tests.scheduling.core import Core


def place_two(placement: str) -> list[Placement]:
    core = Core("prefill-0", "prefill-1", "prefill-2", "decode-0", placement=placement)
    for request_id in ("cmpl-1", "cmpl-2"):
        core.arrive(request_id)
    return [decision.placement for decision in core.conductor.decisions]


@pytest.mark.parametrize("name", list(PLACEMENT_MODES))
def test_every_mode_chooses_and_explains_each_row_and_repeats_itself(name: str) -> None:
    mode = PLACEMENT_MODES[name]
    assert mode.name == name
    assert mode.summary
    placements = place_two(name)
    assert placements == place_two(name)
    for placement in placements:
        assert placement.chosen in placement.estimates
        assert explain_placement(placement, mode).startswith(f"{placement.prefill}: ")
        for row in placement.estimates:
            why_not = explain_rejected_candidate(row, placement, mode)
            assert bool(why_not) == (row != placement.chosen)


class LastWorker(PlacementMode):
    """Choose the prefill worker with the last name."""

    name = "last_worker"
    summary = "the worker with the last name"
    compares_ttft = False

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        return PrefixSource.OWN

    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        return Choice(rows[-1])

    @classmethod
    def explain_choice(cls, placement: Placement) -> str:
        return "the last name"

    @classmethod
    def explain_rejection(cls, row: Estimate, placement: Placement) -> str:
        return "an earlier name"


@pytest.fixture
def last_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register a mode for one test."""
    monkeypatch.setattr(PLACEMENT_MODES, "_items", dict(PLACEMENT_MODES))
    PLACEMENT_MODES.register(LastWorker)
    yield


@pytest.mark.usefixtures("last_worker")
def test_a_mode_of_ones_own_is_chosen_by_name_and_explains_itself() -> None:
    placement = place_two("last_worker")[0]
    assert placement.prefill == WorkerId("prefill-2")
    assert "prefill-2: the last name;" in explain_placement(placement, LastWorker)
    row = placement.estimates[0]
    assert explain_rejected_candidate(row, placement, LastWorker) == "an earlier name"


def test_a_name_is_registered_once() -> None:
    modes: Registry[type[PlacementMode]] = Registry("placement mode")
    assert modes.register(LastWorker) is LastWorker
    modes.register(LastWorker)
    with pytest.raises(ValueError, match="two placement modes 'last_worker'"):
        modes.register(type("Other", (LastWorker,), {}))
    assert isinstance(modes["last_worker"](ModeSettings()), LastWorker)


# -- what operators read -------------------------------------------------------------------------


def a_row(name: str, queue_s: float, transfer_s: float, prefill_s: float) -> Estimate:
    ttft_s = queue_s + transfer_s + prefill_s
    return Estimate(WorkerId(name), None, 0, None, 0, 0, queue_s, transfer_s, prefill_s, ttft_s)


def why_not(row: Estimate, chosen: Estimate, mode: str) -> str:
    placement = Placement(chosen, WorkerId("decode-0"), 0.05, (chosen, row))
    return explain_rejected_candidate(row, placement, PLACEMENT_MODES[mode])


def test_each_candidate_says_why_it_was_not_taken() -> None:
    chosen = a_row("prefill-1", 0.0, 0.2, 0.3)
    assert why_not(chosen, chosen, "kvcache_centric") == ""
    later = a_row("prefill-2", 1.0, 0.0, 0.8)
    assert why_not(later, chosen, "kvcache_centric") == (
        "first token 1.30 s later (queue +1.00 s, prefill +500 ms)"
    )
    assert why_not(later, chosen, "load_balance") == "queue 1.00 s longer"
    assert why_not(later, chosen, "random") == "not drawn"
    queued = a_row("prefill-0", 0.2, 0.0, 0.3)
    assert why_not(queued, chosen, "min_ttft") == "as soon, behind a longer queue"
    twin = a_row("prefill-3", 0.0, 0.2, 0.3)
    assert why_not(twin, chosen, "min_ttft") == "as soon, a later name"
    local = LocalPrefillEstimate(
        *(WorkerId("decode-0"), None, 0, None, 0, 0, 0.0, 0.0, 0.1, 0.1),
        *(0.4, 0.05, WorkerId("prefill-1")),
    )
    assert why_not(local, chosen, "min_ttft") == (
        "others there would wait 400 ms for a token, over their 50 ms"
    )


def test_times_are_written_as_people_read_them() -> None:
    assert [describe_seconds(s) for s in (0.0, 0.0012, 0.0123, 0.25, 1.5)] == [
        "0 ms", "1.2 ms", "12 ms", "250 ms", "1.50 s",
    ]  # fmt: skip
