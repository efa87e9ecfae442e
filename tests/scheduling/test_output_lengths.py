from random import Random

from halfmoon_scheduling.output_lengths import (
    ENOUGH,
    MAX_GROUPS,
    WINDOW,
    LengthSample,
    OutputLengths,
)


def test_a_sample_says_how_many_answers_are_longer() -> None:
    sample = LengthSample()
    for n in [10, 20, 20, 40]:
        sample.observe(n)
    assert [sample.share_over(n) for n in (5, 10, 19.5, 20, 40)] == [1.0, 0.75, 0.75, 0.25, 0.0]
    assert [sample.quantile(q) for q in (0.0, 0.25, 0.5, 0.99)] == [10, 20, 20, 40]


def test_of_what_nothing_is_known_all_answers_may_be_longer() -> None:
    assert LengthSample().share_over(1e9) == 1.0
    assert LengthSample().quantile(0.5) == 0


def test_only_the_latest_answers_count() -> None:
    sample, dice = LengthSample(), Random(7)
    for _ in range(WINDOW):
        sample.observe(dice.randrange(1, 50))
        sample.check()
    for _ in range(WINDOW):
        sample.observe(100)
        sample.check()
    assert len(sample) == WINDOW
    assert sample.share_over(99) == 1.0


def test_a_group_borrows_until_it_has_seen_enough() -> None:
    lengths = OutputLengths()
    for _ in range(ENOUGH):
        lengths.observe("chat", 1000, 300)
    assert lengths.sample("chat", 1000).quantile(0.5) == 300
    # another tenant: from its prompt class; another class: from all
    assert lengths.sample("agent", 1000).quantile(0.5) == 300
    assert lengths.sample("agent", 10).quantile(0.5) == 300
    for _ in range(ENOUGH - 1):
        lengths.observe("agent", 1000, 5)
    assert lengths.sample("agent", 1000) is lengths.sample("nobody", 1000)
    lengths.observe("agent", 1000, 5)
    assert lengths.sample("agent", 1000).quantile(0.99) == 5
    assert lengths.sample("chat", 1000).quantile(0.01) == 300
    lengths.check()


def test_tenants_without_end_take_no_memory_without_end() -> None:
    lengths = OutputLengths()
    for i in range(MAX_GROUPS + 10):
        lengths.observe(f"tenant-{i}", 100, 5)
    lengths.check()
