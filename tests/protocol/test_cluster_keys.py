"""The text of a cluster key: one key in each line, the first to prove with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.cluster_keys import MAX_KEYS, cluster_key_id, split_cluster_keys
from halfmoon_protocol.examples import KEY_ID

OLD = "the moon is made of green cheese"
NEW = "the moon is made of blue cheese"


@pytest.mark.parametrize(
    "text",
    [f"{NEW}\n{OLD}", f"{NEW}\n{OLD}\n", f"\n  {NEW} \r\n\n\t{OLD}\r\n", f"{NEW}\n\n\n{OLD}"],
)
def test_each_line_has_a_key_whatever_white_space_is_around(text: str) -> None:
    assert split_cluster_keys(text) == (NEW, OLD)


@given(
    st.lists(
        st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=16, max_size=64),
        min_size=1,
        max_size=MAX_KEYS,
        unique=True,
    )
)
def test_keys_keep_their_order(keys: list[str]) -> None:
    assert split_cluster_keys("\n".join(keys)) == tuple(keys)
    assert split_cluster_keys("") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hunter2", "a cluster key of 7 characters: it needs 16 at least"),
        (f"{OLD}\nhunter2", "cluster key 2 of 2: a key of 7 characters: it needs 16 at least"),
        (f"{OLD}\n{NEW}\n{OLD}", "cluster key 3 of 3: a key that is also key 1: remove one"),
        (" \n ", "white space"),
        ("\n".join(f"{OLD} {i}" for i in range(9)), "9 cluster keys.*at most 8"),
    ],
)
def test_what_is_wrong_with_a_text_is_told_without_a_key(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        split_cluster_keys(text)
    assert "cheese" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_the_id_of_a_key_is_what_the_protocol_says() -> None:
    """Computed with `openssl dgst -sha256 -hmac`, for those who write it in another language."""
    assert cluster_key_id("0123456789abcdef0123456789abcdef") == KEY_ID == "ac09f77b7f8f7373"
    assert cluster_key_id("") == ""
    assert cluster_key_id(OLD) != cluster_key_id(NEW)
