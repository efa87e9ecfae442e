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


def test_the_least_busy_worker_goes_to_the_side_that_stays_busier() -> None:
    policy = RolePolicy(LIMITS)
    ((at_s, change),) = watch(
        policy, loads("prefill", 1.2, 1.4), loads("decode", 0.3, 0.1, 0.2), 0, 100
    )
    assert at_s == 60
    assert (change.worker_id, change.to) == ("decode-1", "prefill")
    assert "prefill has had a load of 1.30, the other side of 0.20" in change.reason


def test_decode_gets_one_too() -> None:
    ((_, change),) = watch(
        RolePolicy(LIMITS), loads("prefill", 0.1, 0.2), loads("decode", 0.9), 0, 100
    )
    assert (change.worker_id, change.to) == ("prefill-0", "decode")
    ((_, change),) = watch(
        RolePolicy(LIMITS), loads("prefill", 0.2, 0.1), loads("decode", 0.9, 0.9), 0, 100
    )
    assert (change.worker_id, change.to) == ("prefill-1", "decode")


def test_a_short_peak_changes_nothing() -> None:
    policy = RolePolicy(LIMITS)
    busy, idle = loads("prefill", 1.2), loads("decode", 0.1, 0.1)
    for begin in range(0, 1000, 60):
        assert watch(policy, busy, idle, begin, begin + 50) == []
        assert policy.observe(loads("prefill", 0.1), idle, begin + 50.0) is None


def test_two_busy_sides_or_two_idle_ones_change_nothing() -> None:
    for prefill, decode in ((1.2, 1.0), (0.5, 0.1), (0.1, 0.5), (1.0, 1.2)):
        policy = RolePolicy(LIMITS)
        assert (
            watch(policy, loads("prefill", *[prefill] * 3), loads("decode", *[decode] * 3), 0, 500)
            == []
        )


def test_after_a_change_there_is_a_rest() -> None:
    policy = RolePolicy(LIMITS)
    found = watch(policy, loads("prefill", 1.2, 1.2), loads("decode", 0.1, 0.1, 0.1), 0, 800)
    assert [at_s for at_s, _ in found] == [60, 360, 660]


def test_after_a_change_the_imbalance_must_last_anew() -> None:
    policy = RolePolicy(RoleLimits(lasting_s=60.0, rest_s=10.0))
    found = watch(policy, loads("prefill", 1.2, 1.2), loads("decode", 0.1, 0.1, 0.1), 0, 200)
    assert [at_s for at_s, _ in found] == [60, 120, 180]


def test_a_side_keeps_its_last_worker() -> None:
    assert watch(RolePolicy(LIMITS), loads("prefill", 5.0), loads("decode", 0.0), 0, 500) == []
    assert watch(RolePolicy(LIMITS), loads("prefill", 5.0), loads("decode"), 0, 500) == []


def test_roles_do_not_swing_when_a_change_would_only_turn_the_imbalance_round() -> None:
    # 0.9 over one worker is 0.45 over two; 1.0 of work over two decode workers is 1.0 over one.
    assert watch(RolePolicy(LIMITS), loads("prefill", 0.9), loads("decode", 0.5, 0.5), 0, 500) == []


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
