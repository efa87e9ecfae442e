"""Where a text ends because it says a stop string."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfmoon_conductor.text.stop_strings import StopStringMatcher

letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, patterns: list[str]) -> str:
    """By definition: the first to be complete, of those the longest."""
    ends = [
        (start + len(pattern), start)
        for pattern in patterns
        for start in range(len(text))
        if text.startswith(pattern, start)
    ]
    return text[: min(ends)[1]] if ends else text


@given(pieces=st.lists(letters, max_size=8), patterns=stops)
@example(pieces=["aaaab"], patterns=["aab"])
@example(pieces=["ab", "b"], patterns=["a"])
def test_the_text_ends_before_the_first_complete_stop_string_however_it_is_cut(
    pieces: list[str], patterns: list[str]
) -> None:
    matcher = StopStringMatcher(patterns)
    said = ""
    for piece in pieces:
        said += matcher.feed(piece)
        matcher.check()
    said += matcher.flush()
    assert said == cut("".join(pieces), patterns)
    assert (matcher.matched is not None) == any(each in "".join(pieces) for each in patterns)


@given(pieces=st.lists(letters, max_size=8), patterns=stops)
def test_no_more_is_held_back_than_may_begin_a_stop_string(
    pieces: list[str], patterns: list[str]
) -> None:
    matcher = StopStringMatcher(patterns)
    text = said = ""
    for piece in pieces:
        text += piece
        said += matcher.feed(piece)
        if matcher.matched is None:
            held = text.removeprefix(said)
            assert not held or any(each.startswith(held) for each in patterns)


def test_a_beginning_that_leads_nowhere_is_given_out_with_what_follows() -> None:
    matcher = StopStringMatcher(["STOP"])
    assert matcher.feed("go ST") == "go "
    assert matcher.feed("ART") == "START"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])
