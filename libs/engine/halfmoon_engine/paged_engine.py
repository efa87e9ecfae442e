"""Draw tokens from a model that a runner computes over a paged pool.

Only rows that draw a token, or whose scores are wanted, go through the model's head.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.batch_checks import check_batch
from halfmoon_engine.cost_fit import measure_costs
from halfmoon_engine.errors import PoolNotAttached
from halfmoon_engine.interface import (
    Draw,
    EngineStage,
    GrammarFailed,
    LayerHook,
    PendingToken,
    Run,
    StageActivations,
    TokenResult,
)
from halfmoon_engine.runners.model_runner import ModelRunner
from halfmoon_engine.sampling.grammar_masks import GrammarMasks, TokenMask
from halfmoon_engine.sampling.sampler import choose_tokens
from halfmoon_engine.sampling.token_logprobs import (
    logprob_rows,
    report_drawn_logprob,
    report_prompt_logprobs,
)
from halfmoon_engine.stages.stage_checks import check_activations, check_can_lend
from halfmoon_models.pool_size import PoolRoom
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost

log = logging.getLogger(__name__)

#: Seconds that a batch waits for masks of grammars after its forward pass: when other tokens are
#: ready, and when there are none.
_GRACE_S = 0.005
_ALONE_S = 0.02
_NO_GRAMMARS = GrammarFailed("this model's tokenizer is none that grammars need", invalid=False)


class PagedEngine:
    """An `Engine` around a runner: of torch with transformers, of native code, or of vLLM."""

    def __init__(
        self,
        runner: ModelRunner,
        layout: KvLayout,
        *,
        name: str,
        n_vocab: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        grammars: GrammarMasks | None = None,
        native: Any | None = None,
        stage: EngineStage | None = None,
    ) -> None:
        """Wrap a probed model.

        Args:
            runner: computes the model, or a stage of it.
            layout: of a page's bytes, with all layers of the model.
            name: as clients write it.
            n_vocab: tokens with both an embedding and a logit.
            max_context: tokens of the longest sequence.
            eos_token_ids: tokens that end a generation.
            grammars: compiles and follows them; None: requests with one get no token.
            native: the extension's module, which draws and scores tokens; None: numpy does.
            stage: layers that the runner computes; None: all.
        """
        self._runner = runner
        self._name = name
        self._layout = layout
        self._stage = stage or EngineStage(n_layers=layout.n_layers)
        self._max_context = max_context
        self._eos_token_ids = eos_token_ids
        self._n_vocab = n_vocab
        self._grammars = grammars
        self._native = native
        #: Pages of the attached pool; 0 before `attach`.
        self._n_pages = 0

    @property
    def description(self) -> str:
        """Name of what computes: torch, or the native extension with its instruction set."""
        return self._runner.description

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self._name

    @property
    def stage(self) -> EngineStage:
        """Layers that this engine computes."""
        return self._stage

    @property
    def layout(self) -> KvLayout:
        """Layout of a page's bytes, of all layers."""
        return self._layout

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that the model allows."""
        return self._max_context

    @property
    def n_vocab(self) -> int:
        """Rows of the embedding, or of the head if those are fewer."""
        return self._n_vocab

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, from the model's generation config."""
        return self._eos_token_ids

    def open_stage(self, index: int, n_stages: int) -> "PagedEngine":
        """Return an engine of one stage over the same weights; see `Engine.open_stage`."""
        check_can_lend(self._stage, index, n_stages)
        stage, runner = self._runner.open_stage(index, n_stages)
        return PagedEngine(
            runner,
            self._layout,
            name=self._name,
            n_vocab=self._n_vocab,
            max_context=self._max_context,
            eos_token_ids=self._eos_token_ids,
            grammars=self._grammars if stage.is_last else None,
            native=self._native,
            stage=stage,
        )

    def attach(self, pool: memoryview) -> None:
        """Use this memory as the pool; a device gets a mirror of the same size.

        Raises:
            ValueError: it holds no page, or is read-only.
        """
        self._n_pages = self._runner.attach(pool)

    def pool_room(self) -> PoolRoom:
        """Say where the bytes of a pool would lie; see `Engine.pool_room`."""
        return self._runner.pool_room()

    def allocate_pool(self, n_bytes: int) -> object | None:
        """Use memory of the device as the pool if the runner can; see `Engine.allocate_pool`."""
        buffer = self._runner.allocate_pool(n_bytes)
        if buffer is not None:
            self._n_pages = n_bytes // self._layout.block_bytes
        return buffer

    def detach(self) -> None:
        """Release the attached memory, so that it can be closed."""
        self._n_pages = 0
        self._runner.detach()

    @torch.inference_mode()
    def forward(
        self,
        runs: Sequence[Run],
        *,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
        activations: StageActivations | None = None,
    ) -> list[TokenResult | None]:
        """Run a ragged batch and choose the next token of each run that wants one.

        Raises:
            PoolNotAttached: before `attach`.
            ValueError: a run that does not fit its pages, the pool or the context; a token that
                is not in the vocabulary; or see `stage_checks.check_activations`.
        """
        if not self._n_pages:
            raise PoolNotAttached("this engine has no pool yet; call attach(memory) first")
        n_pages = None if self._runner.checks_pages else self._n_pages
        check_batch(runs, self._layout, n_pages, self._max_context)
        check_activations(runs, self._stage, activations)
        if not runs:
            return []
        asked = self._request_masks(runs)  # child processes compute these during the forward
        tokens = np.concatenate([np.asarray(run.token_ids, dtype=np.int64) for run in runs])
        self._check_tokens(tokens)
        last_rows = np.cumsum([len(run.token_ids) for run in runs]) - 1
        drawing = [i for i, run in enumerate(runs) if run.draw is not None]
        rows = np.concatenate([last_rows[drawing], *logprob_rows(runs)])
        logits = self._runner.logits(runs, tokens, rows, before_layer, after_layer, activations)
        result: list[TokenResult | None] = [None] * len(runs)
        if drawing:
            ends = [runs[i].start + len(runs[i].token_ids) for i in drawing]
            draws = [draw for run in runs if (draw := run.draw) is not None]
            masks = [asked.get(i) for i in drawing]
            chosen = self._choose(logits[: len(drawing)], draws, ends, masks)
            for i, each in zip(drawing, chosen, strict=True):
                result[i] = each
        report_prompt_logprobs(logits, runs, result, self._native)
        return result

    @torch.inference_mode()
    def finish(self, late: Sequence[PendingToken], wait_s: float) -> list[TokenResult]:
        """Choose the tokens that were late, waiting at most so long."""
        assert self._grammars is not None
        waiting = [each for each in late if isinstance(each, _LateToken)]
        assert len(waiting) == len(late), "a late token of another engine"
        self._grammars.wait_for_masks([each.mask for each in waiting], wait_s)
        return [self._finish(each) for each in waiting]

    def check_alive(self) -> None:
        """Raise EngineLost if a process that computes the model has ended."""
        self._runner.check_alive()

    def measure(self) -> tuple[PrefillCost, DecodeCost]:
        """Time a few forwards on scratch pages of the attached pool and fit the cost models."""
        if not self._n_pages:
            raise PoolNotAttached("measuring needs scratch pages; call attach(memory) first")
        costs = measure_costs(self, self._n_pages)
        if self._grammars is not None:
            # The worker serves soon: the first grammar does not wait for the template then.
            self._grammars.start()
        return costs

    def _request_masks(self, runs: Sequence[Run]) -> dict[int, TokenMask | GrammarFailed]:
        """Request masks for the runs that have a grammar, and return them by run."""
        return {
            i: _NO_GRAMMARS if self._grammars is None else self._grammars.request_mask(run.draw)
            for i, run in enumerate(runs)
            if run.draw is not None and run.draw.sampling.grammar
        }

    def _choose(
        self,
        logits: torch.Tensor,
        draws: Sequence[Draw],
        positions: Sequence[int],
        masks: Sequence[TokenMask | GrammarFailed | None],
    ) -> list[TokenResult]:
        """Choose a token for each row of logits, [n, vocab], as far as its mask has come."""
        asked = [mask for mask in masks if isinstance(mask, TokenMask)]
        if asked and self._grammars is not None:
            self._grammars.wait_for_masks(asked, _ALONE_S if len(asked) == len(masks) else _GRACE_S)
        known = [mask.result if isinstance(mask, TokenMask) else mask for mask in masks]
        chosen: list[TokenResult] = []
        ready: list[int] = []
        for row, (mask, result) in enumerate(zip(masks, known, strict=True)):
            if isinstance(result, GrammarFailed):
                log.warning("a grammar was not followed: %s", result.reason)
                chosen.append(result)
            elif isinstance(mask, TokenMask) and result is None:
                # A copy, so that the other logits can be freed.
                chosen.append(_LateToken(logits[row].clone(), draws[row], positions[row], mask))
            else:
                chosen.append(0)
                ready.append(row)
        if not ready:
            return chosen
        everything = len(ready) == len(draws)
        tokens = choose_tokens(
            logits if everything else logits[ready],
            [draws[row] for row in ready],
            [positions[row] for row in ready],
            {i: may for i, row in enumerate(ready) if isinstance(may := known[row], np.ndarray)},
            self._native,
        )
        for row, token in zip(ready, tokens, strict=True):
            chosen[row] = token
        return chosen

    def _finish(self, late: "_LateToken") -> TokenResult:
        allowed = late.mask.result
        if allowed is None:
            return late
        if isinstance(allowed, GrammarFailed):
            log.warning("a grammar was not followed: %s", allowed.reason)
            return allowed
        (token,) = choose_tokens(
            late.logits[None], [late.draw], [late.position], {0: allowed}, self._native
        )
        report_drawn_logprob(late.logits, late.draw, token, self._native)
        return token

    def _check_tokens(self, tokens: NDArray[np.int64]) -> None:
        if tokens.min() < 0 or tokens.max() >= self._n_vocab:
            raise ValueError(
                f"token {tokens.max() if tokens.min() >= 0 else tokens.min()} is not in the "
                f"vocabulary of {self._n_vocab}"
            )


@dataclass(frozen=True)
class _LateToken(PendingToken):
    """A token whose row of logits waits for its mask."""

    logits: torch.Tensor
    draw: Draw
    position: int
    mask: TokenMask
