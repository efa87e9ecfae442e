"""The real engine: a transformers model whose attention goes over a paged pool.

The batch is one row of tokens, runs side by side; positions and the attention's plan keep
them apart. Only rows that draw a token go through the model's head.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from halfmoon_engine.architecture import KvShape
from halfmoon_engine.costs import measure_costs
from halfmoon_engine.device_pool import DevicePool
from halfmoon_engine.errors import PoolNotAttached
from halfmoon_engine.grammar import GrammarNotFollowed, Grammars
from halfmoon_engine.interface import Draw, LayerHook, Run
from halfmoon_engine.paged_attention import attending
from halfmoon_engine.plan import plan_forward
from halfmoon_engine.pool import TORCH_DTYPES, HostPool, Pool
from halfmoon_engine.runs import check_runs
from halfmoon_engine.sampling import Allowed, choose_tokens
from halfmoon_engine.scoring import report_scores, scored_rows
from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.layout import DType, KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost

log = logging.getLogger(__name__)

DTYPE_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class TorchEngine:
    """An `Engine` around a model that `checkpoint.load_torch_engine` loaded and probed."""

    def __init__(
        self,
        model: Any,
        shape: KvShape,
        *,
        name: str,
        fingerprint: str,
        block_size: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars | None = None,
        mirror: bool = False,
    ) -> None:
        """Wrap a model that has our attention.

        Args:
            model: in evaluation mode, on its device.
            shape: of its KV.
            name: as clients write it.
            fingerprint: of its checkpoint.
            block_size: tokens per page.
            max_context: tokens of the longest sequence.
            eos_token_ids: tokens that end a generation.
            grammars: compiles and follows them; None: requests with one get no token.
            mirror: keep a pool on the device beside the attached memory even where the
                device could read that memory.
        """
        self._model = model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._mirror = mirror or self._device.type != "cpu"
        self._name = name
        self._layout = KvLayout(
            model=fingerprint,
            n_layers=shape.n_layers,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            dtype=DTYPE_NAMES[self._dtype],
            block_size=check_block_size(block_size),
        )
        self._max_context = max_context
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._pool: Pool | None = None

    @property
    def name(self) -> str:
        """The model's name as clients write it."""
        return self._name

    @property
    def layout(self) -> KvLayout:
        """What a page's bytes mean."""
        return self._layout

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that the model allows."""
        return self._max_context

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, from the model's generation config."""
        return self._eos_token_ids

    def attach(self, pool: memoryview) -> None:
        """Use this memory as the pool; a device's own pool is made as large.

        Raises:
            ValueError: it holds no page, or is read-only.
        """
        self._pool = (
            DevicePool(pool, self._layout, self._device)
            if self._mirror
            else HostPool(pool, self._layout)
        )

    def detach(self) -> None:
        """Let go of the attached memory, so that it can be closed."""
        self._pool = None

    @torch.inference_mode()
    def forward(
        self,
        runs: Sequence[Run],
        *,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> list[int | None]:
        """Run a ragged batch and choose the next token of each run that wants one.

        Raises:
            PoolNotAttached: before `attach`.
            ValueError: a run that does not fit its pages, the pool or the context, or a
                token that is not in the vocabulary.
        """
        if self._pool is None:
            raise PoolNotAttached("this engine has no pool yet; call attach(memory) first")
        check_runs(runs, self._layout, self._pool.n_pages, self._max_context)
        if not runs:
            return []
        plan = plan_forward(runs, self._layout, self._pool, self._device, self._dtype)
        plan.before_layer, plan.after_layer = before_layer, after_layer
        tokens = np.concatenate([np.asarray(run.token_ids, dtype=np.int64) for run in runs])
        lengths = [len(run.token_ids) for run in runs]
        positions = np.concatenate(
            [np.arange(run.start, run.start + n) for run, n in zip(runs, lengths, strict=True)]
        )
        last_rows = np.cumsum(lengths) - 1
        drawing = [i for i, run in enumerate(runs) if run.draw is not None]
        rows = np.concatenate([last_rows[drawing], *scored_rows(runs)])
        with attending(plan):
            logits = self._logits(tokens, positions, rows)
        result: list[int | None] = [None] * len(runs)
        if drawing:
            draws = [draw for run in runs if (draw := run.draw) is not None]
            ends = [runs[i].start + lengths[i] for i in drawing]
            allowed, failed = self._allowed(draws)
            chosen = choose_tokens(logits[: len(drawing)], draws, ends, allowed)
            for i, token in zip(drawing, chosen, strict=True):
                result[i] = token
            report_scores(logits, runs, result)
            for row in failed:
                result[drawing[row]] = None
        else:
            report_scores(logits, runs, result)
        return result

    def measure(self) -> tuple[PrefillCost, DecodeCost]:
        """Time a few forwards on scratch pages of the attached pool and fit the cost models."""
        if self._pool is None:
            raise PoolNotAttached("measuring needs scratch pages; call attach(memory) first")
        return measure_costs(self, self._pool.n_pages)

    def _allowed(self, draws: Sequence[Draw]) -> tuple[dict[int, Allowed], list[int]]:
        """By row, the tokens that grammars allow; and the rows whose grammar can't be followed."""
        allowed: dict[int, Allowed] = {}
        failed: list[int] = []
        for row, draw in enumerate(draws):
            if not draw.sampling.grammar:
                continue
            try:
                if self._grammars is None:
                    raise GrammarNotFollowed("this model's tokenizer is none that grammars need")
                allowed[row] = self._grammars.allowed(draw)
            except GrammarNotFollowed as error:
                log.warning("a grammar was not followed: %s", error)
                failed.append(row)
        return allowed, failed

    def _logits(
        self, tokens: "np.typing.NDArray[np.int64]", positions: Any, rows: Any
    ) -> torch.Tensor:
        """[n_rows, vocab] of the chosen rows; the model's own head makes them."""
        embedding = self._model.get_input_embeddings()
        if tokens.min() < 0 or tokens.max() >= embedding.num_embeddings:
            raise ValueError(
                f"token {tokens.max() if tokens.min() >= 0 else tokens.min()} is not in the "
                f"vocabulary of {embedding.num_embeddings}"
            )
        kept = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(self._device)
        options = {"logits_to_keep": kept} if self._selects_logits else {}
        out = self._model(
            input_ids=torch.from_numpy(tokens)[None].to(self._device),
            position_ids=torch.from_numpy(positions)[None].to(self._device),
            use_cache=False,
            **options,
        )
        logits: torch.Tensor = out.logits[0]
        return logits if self._selects_logits else logits[kept]
