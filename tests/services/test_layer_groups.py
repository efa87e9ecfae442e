"""Which layers of a request's blocks travel in one transfer."""

import pytest

from halfmoon_prefix_cache.layer_groups import layer_groups

KIB, MIB = 1024, 1024 * 1024


@pytest.mark.parametrize("n_layers", [1, 2, 3, 8, 28, 61])
@pytest.mark.parametrize("layer_bytes", [1, 64 * KIB, MIB, 5 * MIB, 8 * MIB, 64 * MIB])
def test_each_layer_is_in_one_group_and_the_groups_are_in_order(
    n_layers: int, layer_bytes: int
) -> None:
    groups = layer_groups(n_layers, layer_bytes)
    assert [layer for group in groups for layer in group] == list(range(n_layers))
    assert all(groups)


def test_groups_are_large_except_the_first_and_the_last_of_many_bytes() -> None:
    assert layer_groups(8, 64 * KIB) == (range(8),)
    groups = layer_groups(28, 2 * MIB)
    assert groups[0] == range(1) and groups[-1] == range(27, 28)
    assert max(len(group) for group in groups) == 8
    # One of several layers has at most 16 MiB, and layers of more bytes are alone.
    assert [len(group) for group in layer_groups(8, 8 * MIB)] == [1, 2, 2, 2, 1]
    assert [len(group) for group in layer_groups(4, 17 * MIB)] == [1, 1, 1, 1]
