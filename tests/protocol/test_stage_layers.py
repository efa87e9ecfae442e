"""How a model's layers are cut into stages: the same everywhere."""

import pytest

from halfmoon_protocol.stage_layers import layer_counts, stage_layers, stage_weights

CUTS = [(n_layers, n_stages) for n_layers in range(1, 130) for n_stages in range(1, n_layers + 1)]


def cut(n_layers: int, n_stages: int) -> list[int]:
    return list(layer_counts(n_layers, n_stages))


def test_every_layer_is_in_one_stage_and_every_stage_has_one() -> None:
    for n_layers, n_stages in CUTS:
        runs = [stage_layers(n_layers, n_stages, index) for index in range(n_stages)]
        assert [layer for run in runs for layer in run] == list(range(n_layers))
        assert all(runs)


def test_the_last_stage_has_at_most_two_layers_more_than_any_other() -> None:
    for n_layers, n_stages in CUTS:
        *others, last = cut(n_layers, n_stages)
        assert all(n in (last - 2, last - 1, last) for n in others)


@pytest.mark.parametrize(
    ("n_layers", "runs"),
    [(16, [7, 9]), (15, [7, 8]), (8, [3, 5]), (80, [19, 20, 20, 21]), (3, [1, 1, 1]), (2, [1, 1])],
)
def test_cuts_that_the_contract_shows(n_layers: int, runs: list[int]) -> None:
    assert cut(n_layers, len(runs)) == runs


def test_the_last_layer_counts_for_nothing_unless_it_is_alone() -> None:
    assert stage_weights([7, 8]) == (0.5, 0.5)
    assert stage_weights([1, 1]) == (0.5, 0.5)
    assert stage_weights([7, 9]) == pytest.approx((7 / 15, 8 / 15))


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "index"), [(2, 3, 0), (4, 2, 2), (4, 2, -1), (4, 0, 0)]
)
def test_a_stage_that_is_none_is_refused(n_layers: int, n_stages: int, index: int) -> None:
    with pytest.raises(ValueError, match=f"stage {index} of {n_stages} of a model of {n_layers}"):
        stage_layers(n_layers, n_stages, index)
