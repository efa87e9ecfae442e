"""The order of the tests: what is kept of a run's durations."""

from tests.durations import renewed_durations


def test_a_file_keeps_its_value_until_it_takes_twice_or_half_as_long() -> None:
    kept = {"a.py": 10.0, "b.py": 10.0, "c.py": 10.0, "gone.py": 9.0, "quick.py": 2.0}
    seen = {
        "a.py": 19.0,
        "b.py": 21.2,
        "c.py": 4.6,
        "new.py": 3.3,
        "short.py": 1.9,
        "quick.py": 0.9,
    }
    assert renewed_durations(kept, seen) == {"a.py": 10.0, "b.py": 21, "c.py": 5, "new.py": 3}
