"""Chain engines of all stages of a model into one that looks like an engine of all layers.

So the suites for engines run on stages. Each stage has a pool of its own. A layer's bytes are
copied there before the stage reads it, and back once it is written: landings and kvstores hold
all layers, as the attached pool does.
"""

from collections.abc import Sequence
from typing import Any

from halfmoon_engine.batch_checks import check_pool
from halfmoon_engine.errors import PoolNotAttached
from halfmoon_engine.interface import Engine, LayerHook, Run, StageActivations, TokenResult


class ChainedEngine:
    """All stages of a model, each an engine with its own pool, over a pool of all layers."""

    def __init__(self, stages: Sequence[Engine]) -> None:
        self.stages = tuple(stages)
        self.layout = stages[0].model_layout
        self._pool: memoryview | None = None
        self._own: list[bytearray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stages[-1], name)

    def attach(self, pool: memoryview) -> None:
        n_pages = check_pool(pool, self.layout)
        self._own = [bytearray(n_pages * each.layout.block_bytes) for each in self.stages]
        for each, own in zip(self.stages, self._own, strict=True):
            each.attach(memoryview(own))
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
                before_layer=self._hook(number, runs, before_layer, to_stage=True),
                after_layer=self._hook(number, runs, after_layer, to_stage=False),
                activations=StageActivations(incoming, None if last else outgoing),
            )
            incoming = outgoing
        return result

    def _hook(
        self, number: int, runs: Sequence[Run], given: LayerHook | None, *, to_stage: bool
    ) -> LayerHook:
        """Return a hook that copies a layer of the runs' pages, around the hook that was given."""
        engine = self.stages[number]
        pages = {page for run in runs for page in run.pages}

        def hook(layer: int) -> None:
            of_model = engine.stage.first_layer + layer
            if given is not None and to_stage:
                given(of_model)
            for page in pages:
                whole, own = self._layer(page, of_model), self._stage_layer(number, page, layer)
                if to_stage:
                    own[:] = whole
                else:
                    whole[:] = own
            if given is not None and not to_stage:
                given(of_model)

        return hook

    def _layer(self, page: int, layer: int) -> memoryview:
        assert self._pool is not None
        begin = page * self.layout.block_bytes + layer * self.layout.layer_bytes
        return self._pool[begin : begin + self.layout.layer_bytes]

    def _stage_layer(self, number: int, page: int, layer: int) -> memoryview:
        layout = self.stages[number].layout
        begin = page * layout.block_bytes + layer * layout.layer_bytes
        return memoryview(self._own[number])[begin : begin + layout.layer_bytes]


def _without_draw(run: Run) -> Run:
    return Run(run.token_ids, run.start, run.pages, None, run.continues)
