"""Cut a model's layers into the stages of a group, in the same way at each service.

Stage i of X begins with layer floor(i·(L-1)/X) of L layers. The last stage ends with layer L-1. So
the last stage has at least as many layers as any other one. It costs the least of them: after the
last layer's keys and values, only the rows whose logits are wanted go on, one of a whole prompt.

The rest is rounded towards the end as well. A pipeline waits for the first chunk to reach the
slowest stage, and for the last chunk to leave it. The first chunk is the cheaper one: it attends to
the fewest tokens.

    L = 16, X = 2:   0 … 6 │ 7 … 15          L = 15, X = 4:   0 1 2 │ 3 … 6 │ 7 … 9 │ 10 … 14
"""

from collections.abc import Sequence


def stage_layers(n_layers: int, n_stages: int, index: int) -> range:
    """Return the layers of one stage.

    Args:
        n_layers: of the model.
        n_stages: runs that the layers are cut into.
        index: of the stage, from 0.

    Raises:
        ValueError: there is no such stage, or no layer for each stage.
    """
    if not 1 <= n_stages <= n_layers or not 0 <= index < n_stages:
        raise ValueError(
            f"stage {index} of {n_stages} of a model of {n_layers} layers: each stage has a layer "
            f"of its own, and stages are 0 to {n_stages - 1}"
        )
    end = n_layers if index + 1 == n_stages else _begin(n_layers, n_stages, index + 1)
    return range(_begin(n_layers, n_stages, index), end)


def _begin(n_layers: int, n_stages: int, index: int) -> int:
    return max(index, index * (n_layers - 1) // n_stages)


def layer_counts(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Return how many of a model's layers each stage has."""
    return tuple(len(stage_layers(n_layers, n_stages, index)) for index in range(n_stages))


def stage_weights(n_layers: Sequence[int]) -> tuple[float, ...]:
    """Return each stage's part of the seconds that a prompt takes in all layers; their sum is 1.

    The model's last layer counts for nothing, unless it is the only one of its stage.

    Args:
        n_layers: of each stage, in their order.
    """
    counts = [*n_layers[:-1], max(1, n_layers[-1] - 1)]
    return tuple(count / sum(counts) for count in counts)
