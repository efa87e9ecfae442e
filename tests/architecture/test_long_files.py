"""Each long test file is in one share of the continuous integration, and short ones in all."""

from pathlib import Path

import pytest

from tests.long_files import LONG_FILES, is_left_out

TESTS = Path(__file__).resolve().parents[1]


def test_the_long_files_exist_and_are_named_once() -> None:
    assert len(set(LONG_FILES)) == len(LONG_FILES)
    assert [name for name in LONG_FILES if not (TESTS / name).is_file()] == []


@pytest.mark.parametrize("n", [1, 4, 7])
def test_each_long_file_runs_in_exactly_one_share(n: int) -> None:
    for name in LONG_FILES:
        runs = [which for which in range(n) if not is_left_out(TESTS / name, f"{which}/{n}")]
        assert len(runs) == 1, name


def test_short_files_run_in_each_share_and_all_files_without_one() -> None:
    assert not any(is_left_out(Path(__file__), f"{which}/4") for which in range(4))
    assert not any(is_left_out(TESTS / name, "") for name in LONG_FILES)


@pytest.mark.parametrize("share", ["4/4", "1", "/4", "-1/4", "1/0", "one/two"])
def test_a_share_that_is_none_is_refused_by_name(share: str) -> None:
    with pytest.raises(ValueError, match="HALFMOON_SHARE is"):
        is_left_out(Path(__file__), share)
