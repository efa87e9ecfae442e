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


def test_few_bytes_are_one_group() -> None:
    assert layer_groups(8, 64 * KIB) == (range(8),)


def test_of_many_bytes_the_first_layer_is_alone_and_so_is_the_last() -> None:
    groups = layer_groups(28, 2 * MIB)
    assert groups[0] == range(1) and groups[-1] == range(27, 28)
    assert max(len(group) for group in groups) == 8


def test_a_group_of_several_layers_has_at_most_16_mib() -> None:
    assert [len(group) for group in layer_groups(8, 8 * MIB)] == [1, 2, 2, 2, 1]


def test_layers_of_more_bytes_are_alone() -> None:
    assert [len(group) for group in layer_groups(4, 17 * MIB)] == [1, 1, 1, 1]
