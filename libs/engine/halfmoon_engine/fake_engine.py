"""Fake an engine without a model, over pages of a real pool.

It keeps the whole contract of `interface.Engine` with numpy only. So paging, transfer, caching and
scheduling can be tested in real processes, fast, and with an oracle. What it writes and draws is
stated in `fake_arithmetic`; it draws from the digest of all KV of a sequence, all read back.

A stage hands on two words for each token: h[i], and position i's part of the digest over the
layers so far. A run's first row also has the part of the positions before it. So the last stage
draws the token of an engine of all layers, and one changed bit of what came changes it.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np

from halfmoon_engine.batch_checks import check_batch, check_pool
from halfmoon_engine.cost_fit import measure_costs
from halfmoon_engine.errors import EngineLost, PoolNotAttached
from halfmoon_engine.fake_arithmetic import FakeArithmetic, HashWords
from halfmoon_engine.interface import (
    EngineStage,
    LayerHook,
    PendingToken,
    Run,
    StageActivations,
    TokenResult,
)
from halfmoon_engine.stages.stage_checks import check_activations, check_can_lend, cut_layers
from halfmoon_models.errors import BadEngineSpec
from halfmoon_models.pool_size import PoolRoom
from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.kv_layout import DType, KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_protocol.sampling import Sampling, Stopping

_GREEDY = Sampling(temperature=0.0)
#: Words that are computed by one call of numpy: as many layers at a time as fit.
_WORDS_AT_ONCE = 1 << 16
#: Words of one token between two stages.
_ACTIVATION_WORDS = 2


class FakeModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and speed of a fake model: the query of its spec string."""

    name: str = "fake"
    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: DType = "float32"
    vocab: int = 997
    max_context: int = 4096
    #: Token that ends a generation; -1 for none.
    eos: int = -1
    #: Models with different seeds give different KV and tokens.
    seed: int = 0
    #: Seconds of each forward, spread over its layers.
    step_s: float = 0.0
    #: Further seconds for each token of a forward.
    token_s: float = 0.0
    #: Tokens of requests with a grammar are late for so many calls of `finish`.
    late: int = 0
    #: A path: an engine is lost once a file of this name, a dot and its process id is there.
    lost_by: str = ""

    def __post_init__(self) -> None:
        row_bytes = self.kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)
        if min(self.layers, self.kv_heads, self.head_dim, self.vocab, self.max_context) < 1:
            raise BadEngineSpec("a fake model's layers, heads, sizes and context are at least 1")
        if row_bytes % 8:
            raise BadEngineSpec(
                f"kv_heads·head_dim of a fake model take {row_bytes} bytes, not a multiple of 8"
            )


def parse_fake_spec(spec: str) -> FakeModelSpec:
    """Read ``fake://tiny?layers=4&vocab=997&step_s=0.001``.

    The query's names are the fields of `FakeModelSpec`; the part before it is the model's name
    unless the query has one.

    Raises:
        BadEngineSpec: an unknown name or a value that is not of its type.
    """
    parts = urlsplit(spec)
    if parts.scheme != "fake":
        raise BadEngineSpec(f"{spec!r} does not start with fake://")
    query = {"name": parts.netloc or "fake", **dict(parse_qsl(parts.query))}
    try:
        return msgspec.convert(query, FakeModelSpec, strict=False)
    except msgspec.ValidationError as error:
        raise BadEngineSpec(
            f"{spec!r}: {error}; known are {', '.join(FakeModelSpec.__struct_fields__)}"
        ) from None


class FakeEngine:
    """A deterministic `Engine` whose next token depends on every KV byte of the sequence."""

    def __init__(
        self,
        model: FakeModelSpec | None = None,
        *,
        block_size: int = 16,
        stage_index: int = 0,
        n_stages: int = 1,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """Make an engine of a model, or of one stage of it.

        Args:
            model: its shape and speed.
            block_size: tokens of a page.
            stage_index: the stage.
            n_stages: stages of the model.
            sleep: lets the seconds of a layer pass in the forward thread; None: `time.sleep`.

        Raises:
            BadEngineStage: there is no such stage, or more stages than layers.
        """
        self.model = model or FakeModelSpec()
        self._sleep = sleep
        shape = self.model
        self._stage = cut_layers(shape.layers, 8 * _ACTIVATION_WORDS, stage_index, n_stages)
        first, end = self._stage.first_layer, self._stage.first_layer + self._stage.n_layers
        self._layout = KvLayout(
            model=(
                f"fake-{shape.seed}-{shape.layers}x{shape.kv_heads}x{shape.head_dim}-{shape.vocab}"
            ),
            n_layers=shape.layers,
            n_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            block_size=check_block_size(block_size),
        )
        #: 64-bit words of one token's keys and values in one layer.
        self._row_words = self._layout.layer_bytes // block_size // 8
        self._arithmetic = FakeArithmetic(
            seed=shape.seed,
            n_layers=shape.layers,
            row_words=self._row_words,
            n_vocab=shape.vocab,
            max_context=shape.max_context,
        )
        #: [layer of the stage, key|value, any slot, word]
        self._page_weights = self._arithmetic.word_weights[first:end].reshape(
            end - first, 2, 1, self._row_words // 2
        )
        #: [page, layer of the stage, key|value, slot, word] over the attached memory.
        self._pool: HashWords | None = None

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.model.name

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
        """Tokens of the longest sequence."""
        return self.model.max_context

    @property
    def n_vocab(self) -> int:
        """Bound of the token ids that it draws; it reads others, too."""
        return self.model.vocab

    @property
    def description(self) -> str:
        """Name of what computes."""
        return "a fake engine"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end token of the spec, if it has one."""
        return () if self.model.eos < 0 else (self.model.eos,)

    def open_stage(self, index: int, n_stages: int) -> "FakeEngine":
        """Return an engine of one stage; there are no weights to lend."""
        check_can_lend(self._stage, index, n_stages)
        return FakeEngine(
            self.model,
            block_size=self._layout.block_size,
            stage_index=index,
            n_stages=n_stages,
            sleep=self._sleep,
        )

    def attach(self, pool: memoryview) -> None:
        """Use this memory as the pool.

        Raises:
            ValueError: it holds no page, or is read-only.
        """
        n_pages = check_pool(pool, self._layout)
        shape = (n_pages, self._layout.n_layers, 2, self._layout.block_size, self._row_words // 2)
        n_bytes = n_pages * self._layout.block_bytes
        words = np.frombuffer(pool.cast("B")[:n_bytes], dtype=np.uint64).reshape(shape)
        self._pool = words[:, self._stage.first_layer :][:, : self._stage.n_layers]

    def pool_room(self) -> PoolRoom:
        """Return that the pool is memory of the host."""
        return PoolRoom()

    def allocate_pool(self, n_bytes: int) -> object | None:
        """Return None: the pool is memory of the host."""
        return None

    def detach(self) -> None:
        """Release the attached memory, so that it can be closed."""
        self._pool = None

    def forward(
        self,
        runs: Sequence[Run],
        *,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
        activations: StageActivations | None = None,
    ) -> list[TokenResult | None]:
        """Write the runs' KV and draw from all KV of each sequence, as read from the pool.

        Raises:
            PoolNotAttached: before `attach`.
            ValueError: a run that does not fit its pages, the pool or the context; activations
                that do not fit, or a token that is wanted before the last stage.
            EngineLost: see `FakeModelSpec.lost_by`.
        """
        self.check_alive()
        pool = self._pool
        if pool is None:
            raise PoolNotAttached("this engine has no pool yet; call attach(memory) first")
        check_batch(runs, self._layout, pool.shape[0], self.max_context)
        check_activations(runs, self._stage, activations)
        incoming, outgoing = _activation_rows(activations)
        n_tokens = sum(len(run.token_ids) for run in runs)
        layer_s = (self.model.step_s + self.model.token_s * n_tokens) / self.model.layers
        watched = before_layer is not None or after_layer is not None
        prefixes: list[HashWords] = []
        computed: list[HashWords | None] = []
        for layer in range(self._stage.n_layers):
            if before_layer is not None:
                before_layer(layer)
            if layer == 0:
                prefixes = self._run_prefixes(pool, runs, incoming)
                computed = [self._all_rows(prefix) for prefix in prefixes]
            for run, prefix, rows in zip(runs, prefixes, computed, strict=True):
                if rows is None:
                    first = self._stage.first_layer + layer
                    self._write(pool, run, layer, self._arithmetic.rows(prefix, first, 1))
                elif watched:
                    self._write(pool, run, layer, rows[:, layer : layer + 1])
                elif layer == 0:
                    self._write(pool, run, 0, rows)
            if after_layer is not None:
                after_layer(layer)
            if layer_s > 0:
                (self._sleep or time.sleep)(layer_s)
        if outgoing is not None:
            self._hand_on(pool, runs, prefixes, incoming, outgoing)
            return [None] * len(runs)
        before = _digests_before(runs, incoming)
        draw_token, score = self._arithmetic.choose, self._arithmetic.score
        tokens = [
            None
            if run.draw is None
            else draw_token(digest + self._read_digest(pool, run), _end(run), run.draw)
            for run, digest in zip(runs, before, strict=True)
        ]
        for run, token in zip(runs, tokens, strict=True):
            draw = run.draw
            if (
                token is not None
                and draw
                and draw.on_logprobs
                and draw.sampling.logprobs is not None
            ):
                draw.on_logprobs([score(token, draw.sampling.logprobs)])
            if run.scoring is not None:
                n_top = run.scoring.n_top
                run.scoring.on_logprobs([score(each, n_top) for each in run.scoring.targets])
        return [
            _LateToken(token, self.model.late)
            if token is not None and self.model.late and run.draw and run.draw.sampling.grammar
            else token
            for run, token in zip(runs, tokens, strict=True)
        ]

    def finish(self, late: Sequence[PendingToken], wait_s: float) -> list[TokenResult]:
        """Return the tokens that have been late often enough."""
        chosen: list[TokenResult] = []
        for each in late:
            assert isinstance(each, _LateToken), "a late token of another engine"
            left = each.n_calls - 1
            chosen.append(each.token if left <= 0 else _LateToken(each.token, left))
        return chosen

    def check_alive(self) -> None:
        """Raise EngineLost if the file is there that the model's spec names."""
        if self.model.lost_by and Path(f"{self.model.lost_by}.{os.getpid()}").exists():
            raise EngineLost("a fake rank ended")

    def measure(self) -> tuple[PrefillCost, DecodeCost]:
        """Time a few forwards on scratch pages of the attached pool."""
        if self._pool is None:
            raise PoolNotAttached("measuring needs scratch pages; call attach(memory) first")
        return measure_costs(self, self._pool.shape[0])

    def expected(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        sampling: Sampling = _GREEDY,
        n_prompt: int | None = None,
        stopping: Stopping | None = None,
    ) -> list[int]:
        """Compute the `n` tokens that must follow `prompt`, without any pool: the oracle.

        Args:
            prompt: all tokens before the first one to choose.
            n: tokens to choose.
            sampling: parameters of the choice.
            n_prompt: tokens of the client in `prompt`, if tokens of an earlier try follow them.
            stopping: masks stop tokens of the first new ones; None: nothing is masked.
        """
        client_prompt = len(prompt) if n_prompt is None else n_prompt
        return self._arithmetic.expected(prompt, n, sampling, client_prompt, stopping)

    def _hand_on(
        self,
        pool: HashWords,
        runs: Sequence[Run],
        prefixes: Sequence[HashWords],
        incoming: HashWords | None,
        outgoing: HashWords,
    ) -> None:
        """Fill the rows for the next stage: the chain, and the digest of the layers so far."""
        row = 0
        for run, prefix in zip(runs, prefixes, strict=True):
            rows = outgoing[row : row + len(prefix)]
            by_position = self._read_position_digests(pool, run)
            rows[:, 0] = prefix
            rows[:, 1] = by_position[run.start :]
            rows[:1, 1] += np.add.reduce(by_position[: run.start])
            row += len(prefix)
        if incoming is not None:
            outgoing[:, 1] += incoming[:, 1]

    def _run_prefixes(
        self, pool: HashWords, runs: Sequence[Run], incoming: HashWords | None
    ) -> list[HashWords]:
        """Return the chain at each position of each run, as it came or from the pool's value."""
        if incoming is None:
            return [self._run_prefix(pool, run) for run in runs]
        return _by_run(incoming[:, 0].copy(), runs)

    def _run_prefix(self, pool: HashWords, run: Run) -> HashWords:
        """Compute the chain at each position of the run, starting from the pool's value."""
        before = self._arithmetic.origin
        if run.start > 0:
            page, slot = divmod(run.start - 1, self._layout.block_size)
            before = int(pool[run.pages[page], 0, 0, slot, 0])
        return self._arithmetic.chain(before, run.token_ids)

    def _all_rows(self, prefix: HashWords) -> HashWords | None:
        """Compute the KV words of the stage, [n, layer, words]; None where they are many."""
        n_layers = self._stage.n_layers
        if len(prefix) * n_layers * self._row_words > _WORDS_AT_ONCE:
            return None
        return self._arithmetic.rows(prefix, self._stage.first_layer, n_layers)

    def _write(self, pool: HashWords, run: Run, first: int, rows: HashWords) -> None:
        """Write a run's KV of some layers from `first` on: [n, layer, words]."""
        n, n_layers, _ = rows.shape
        layers = slice(first, first + n_layers)
        words = rows.reshape(n, n_layers, 2, self._row_words // 2)
        page, slot = divmod(run.start, self._layout.block_size)
        if slot + n <= self._layout.block_size:
            pool[run.pages[page], layers, :, slot : slot + n] = words.transpose(1, 2, 0, 3)
            return
        positions = np.arange(run.start, _end(run))
        pages = np.asarray(run.pages, dtype=np.int64)[positions // self._layout.block_size]
        pool[pages, layers, :, positions % self._layout.block_size] = words

    def _read_digest(self, pool: HashWords, run: Run) -> int:
        """Compute the digest of all KV of a sequence in this stage's layers."""
        n, n_layers = _end(run), self._stage.n_layers
        if n <= self._layout.block_size and n * n_layers * self._row_words <= _WORDS_AT_ONCE:
            weighted = pool[run.pages[0], :, :, :n] * self._page_weights
            by_position = np.add.reduce(weighted, axis=(0, 1, 3))
            return int(np.dot(by_position, self._arithmetic.position_weights[:n]))
        return int(np.add.reduce(self._read_position_digests(pool, run)))

    def _read_position_digests(self, pool: HashWords, run: Run) -> HashWords:
        """Compute each position's part of the digest, as many layers at a time as is bounded."""
        n, n_layers = _end(run), self._stage.n_layers
        pages = np.asarray(run.pages[: self._layout.blocks_for(n)], dtype=np.int64)
        n_words = len(pages) * self._layout.block_size * self._row_words
        step = max(1, _WORDS_AT_ONCE // n_words)
        digests = np.zeros(n, dtype=np.uint64)
        for layer in range(0, n_layers, step):
            layers = slice(layer, layer + step)
            weighted = pool[pages, layers] * self._page_weights[layers]
            digests += np.add.reduce(weighted, axis=(1, 2, 4)).reshape(-1)[:n]
        return digests * self._arithmetic.position_weights[:n]


class _LateToken(PendingToken):
    """A token that `finish` returns after so many calls."""

    def __init__(self, token: int, n_calls: int) -> None:
        self.token = token
        self.n_calls = n_calls


def _activation_rows(
    activations: StageActivations | None,
) -> tuple[HashWords | None, HashWords | None]:
    """View incoming and outgoing activations as words, [n_tokens, words of a token]."""
    if activations is None:
        return None, None
    incoming, outgoing = (
        None
        if side is None
        else np.frombuffer(side.cast("B"), dtype=np.uint64).reshape(-1, _ACTIVATION_WORDS)
        for side in (activations.incoming, activations.outgoing)
    )
    return incoming, outgoing


def _digests_before(runs: Sequence[Run], incoming: HashWords | None) -> list[int]:
    """Return each run's digest of the layers before this stage."""
    if incoming is None:
        return [0] * len(runs)
    return [int(np.add.reduce(rows)) for rows in _by_run(incoming[:, 1], runs)]


def _by_run(rows: HashWords, runs: Sequence[Run]) -> list[HashWords]:
    """Cut rows of a batch's tokens into those of each run."""
    ends = np.cumsum([len(run.token_ids) for run in runs])
    return [rows[end - len(run.token_ids) : end] for run, end in zip(runs, ends, strict=True)]


def _end(run: Run) -> int:
    return run.start + len(run.token_ids)
