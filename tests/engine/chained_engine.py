"""Chain engines of all stages of a model into one that looks like an engine of all layers.

So the suites for engines run on stages. All stages have the same pool, whose pages hold all
layers.
"""

from collections.abc import Sequence
from typing import Any

from halfmoon_engine.batch_checks import check_pool
from halfmoon_engine.errors import PoolNotAttached
from halfmoon_engine.interface import Engine, LayerHook, Run, StageActivations, TokenResult


class ChainedEngine:
    """All stages of a model, each an engine, over one pool."""

    def __init__(self, stages: Sequence[Engine]) -> None:
        self.stages = tuple(stages)
        self.layout = stages[0].layout
        self._pool: memoryview | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stages[-1], name)

    def attach(self, pool: memoryview) -> None:
        check_pool(pool, self.layout)
        for each in self.stages:
            each.attach(pool)
        self._pool = pool

    def detach(self) -> None:
        for each in self.stages:
            each.detach()
        self._pool = None

    def forward(
        self,
        runs: Sequence[Run],
        *,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> list[TokenResult | None]:
        if self._pool is None:
            raise PoolNotAttached("nothing is attached")
        n_tokens = sum(len(run.token_ids) for run in runs)
        incoming: memoryview | None = None
        result: list[TokenResult | None] = []
        for number, each in enumerate(self.stages):
            last = each.stage.is_last
            asked = list(runs) if last else [_without_draw(run) for run in runs]
            outgoing = memoryview(bytearray(n_tokens * each.stage.activation_bytes))
            result = each.forward(
                asked,
                before_layer=self._of_model(number, before_layer),
                after_layer=self._of_model(number, after_layer),
                activations=StageActivations(incoming, None if last else outgoing),
            )
            incoming = outgoing
        return result

    def _of_model(self, number: int, hook: LayerHook | None) -> LayerHook | None:
        """Return a hook that calls the given one with the layer's number among the model's."""
        if hook is None:
            return None
        first = self.stages[number].stage.first_layer
        return lambda layer: hook(first + layer)


def _without_draw(run: Run) -> Run:
    return Run(run.token_ids, run.start, run.pages, None, run.continues)
