import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.cluster.role_policy import RoleChange, RoleLimits, RolePolicy

LIMITS = RoleLimits(busy_load=0.8, ratio=1.5, lasting_s=60.0, rest_s=300.0, least_workers=1)


def loads(side: str, *values: float) -> dict[WorkerId, float]:
    return {WorkerId(f"{side}-{i}"): value for i, value in enumerate(values)}


def watch(
    policy: RolePolicy,
    prefill: dict[WorkerId, float],
    decode: dict[WorkerId, float],
    begin: float,
    end: float,
) -> list[tuple[float, RoleChange]]:
    """What is proposed, looking every ten seconds."""
    found = []
    for now in range(int(begin), int(end), 10):
        if (change := policy.observe(prefill, decode, float(now))) is not None:
            found.append((float(now), change))
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "changed"),
    [
        ((1.2, 1.4), (0.3, 0.1, 0.2), ("decode-1", "prefill")),
        ((0.1, 0.2), (0.9,), ("prefill-0", "decode")),
        ((0.2, 0.1), (0.9, 0.9), ("prefill-1", "decode")),
    ],
)
def test_the_least_busy_worker_goes_to_the_side_that_stays_busier(
    prefill: tuple[float, ...], decode: tuple[float, ...], changed: tuple[str, str]
) -> None:
    found = watch(RolePolicy(LIMITS), loads("prefill", *prefill), loads("decode", *decode), 0, 100)
    ((at_s, change),) = found
    assert (at_s, change.worker_id, change.to) == (60, *changed)
    if changed[1] == "prefill":
        assert "prefill has had a load of 1.30, the other side of 0.20" in change.reason


def test_a_short_peak_changes_nothing() -> None:
    policy = RolePolicy(LIMITS)
    busy, idle = loads("prefill", 1.2), loads("decode", 0.1, 0.1)
    for begin in range(0, 1000, 60):
        assert watch(policy, busy, idle, begin, begin + 50) == []
        assert policy.observe(loads("prefill", 0.1), idle, begin + 50.0) is None


@pytest.mark.parametrize(
    ("rest_s", "until_s", "times"), [(300.0, 800, [60, 360, 660]), (10.0, 200, [60, 120, 180])]
)
def test_after_a_change_there_is_a_rest_and_the_imbalance_must_last_anew(
    rest_s: float, until_s: float, times: list[float]
) -> None:
    policy = RolePolicy(RoleLimits(lasting_s=60.0, rest_s=rest_s))
    found = watch(policy, loads("prefill", 1.2, 1.2), loads("decode", *[0.1] * 3), 0, until_s)
    assert [at_s for at_s, _ in found] == times


#: 0.9 over one worker is 0.45 over two; 1.0 of work over two decode workers is 1.0 over one.
NO_CHANGE: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "both are busy": ((1.2,) * 3, (1.0,) * 3),
    "both are busy, decode more": ((1.0,) * 3, (1.2,) * 3),
    "both are idle": ((0.5,) * 3, (0.1,) * 3),
    "both are idle, decode less": ((0.1,) * 3, (0.5,) * 3),
    "it is the last worker of its side": ((5.0,), (0.0,)),
    "there is none": ((5.0,), ()),
    "it would only turn the imbalance round": ((0.9,), (0.5, 0.5)),
}


@pytest.mark.parametrize(("prefill", "decode"), NO_CHANGE.values(), ids=NO_CHANGE)
def test_none_changes_where(prefill: tuple[float, ...], decode: tuple[float, ...]) -> None:
    policy = RolePolicy(LIMITS)
    assert watch(policy, loads("prefill", *prefill), loads("decode", *decode), 0, 500) == []


def test_work_that_moves_with_the_workers_comes_to_rest() -> None:
    """Ten workers, work of 4 and of 2: whoever begins, it ends near two to one and stays."""
    for n_prefill in range(1, 10):
        policy, changes = RolePolicy(LIMITS), 0
        sides = n_prefill
        for now in range(0, 20_000, 10):
            prefill = loads("prefill", *[4 / sides] * sides)
            decode = loads("decode", *[2 / (10 - sides)] * (10 - sides))
            change = policy.observe(prefill, decode, float(now))
            if change is not None:
                sides += 1 if change.to == "prefill" else -1
                changes += 1
        assert changes <= 9
        assert watch(policy, prefill, decode, 20_000, 21_000) == []
