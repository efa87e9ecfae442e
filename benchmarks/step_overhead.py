"""Measure Python's part of a decode step: an engine's forward without the model's arithmetic.

The model's call is replaced by one that returns prepared logits, and its own time is subtracted.
What remains is checks, the plan, tokens, sampling and log probabilities. Wall time has two threads;
processor time is that of the whole process with one thread, so other programs do not count in it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from halfmoon_engine.interface import Draw, Run
from halfmoon_engine.load import load_engine
from halfmoon_engine.native.extension import NativeMode, native_extension
from halfmoon_protocol.sampling import Sampling

if TYPE_CHECKING:
    from halfmoon_engine.paged_engine import PagedEngine

BATCHES = (1, 8, 16)
CONTEXT, BLOCK_SIZE = 2048, 64
#: Of Llama 2 and Qwen 3. Some twenty tokens have nearly all of the mass.
VOCABULARIES = (32_000, 151_936)
THREADS = 2
KINDS = {
    "greedy": Sampling(temperature=0.0),
    "temperature 1": Sampling(seed=1),
    "top-p 0.95": Sampling(temperature=0.8, top_p=0.95, seed=1),
    "top-k 40": Sampling(top_k=40, seed=1),
    "greedy, penalties": Sampling(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1),
    "greedy, 5 logprobs": Sampling(temperature=0.0, logprobs=5),
    "all of them": Sampling(
        top_p=0.95, top_k=40, min_p=0.01, presence_penalty=0.5, logprobs=5, seed=1
    ),
}


def run(console: Console, repeats: int = 30) -> None:
    """Measure by way of sampling, size of the batch, and what computes the model."""
    table = Table(
        title=(
            f"A decode step without the model, contexts of {CONTEXT} tokens: "
            f"µs of processor time / of wall time with {THREADS} threads"
        ),
        box=None,
    )
    table.add_column("computed by")
    table.add_column("vocabulary", justify="right")
    table.add_column("sampling", no_wrap=True)
    for n in BATCHES:
        table.add_column(f"batch {n}", justify="right")
    modes: list[NativeMode] = ["off"] if native_extension() is None else ["off", "on"]
    for mode in modes:
        name = "torch" if mode == "off" else "native"
        for n_vocab in VOCABULARIES:
            with _engine(mode, n_vocab) as (engine, call):
                for kind, sampling in KINDS.items():
                    steps = [_steps(n, sampling) for n in BATCHES]
                    cells = [_cell(engine, call, step, repeats) for step in steps]
                    table.add_row(name, f"{n_vocab:,}", kind, *cells)
    console.print(table)


class _Call:
    """Stands for the model's arithmetic, and keeps its own time."""

    def __init__(self, n_vocab: int) -> None:
        import numpy as np

        dice = np.random.default_rng(1)
        self.clock: Callable[[], float] = time.process_time
        self.seconds = 0.0
        self.logits = 2 * dice.standard_normal((max(BATCHES), n_vocab), dtype=np.float32)
        self.logits[:, dice.integers(n_vocab, size=20)] += 12.0

    def by_torch(self, **options: Any) -> SimpleNamespace:
        """Return logits as a model of transformers does."""
        import torch

        start = self.clock()
        result = torch.from_numpy(self.logits[: len(options["logits_to_keep"])].copy())[None]
        self.seconds += self.clock() - start
        return SimpleNamespace(logits=result)

    def natively(self, batch: Any, tokens: Any, rows: Any, n: int, out: Any, *_: Any) -> None:
        """Write logits as the extension's decoder does."""
        start = self.clock()
        out[:] = self.logits[:n]
        self.seconds += self.clock() - start


@contextmanager
def _engine(mode: NativeMode, n_vocab: int) -> Iterator[tuple["PagedEngine", _Call]]:
    """Open a tiny model's engine whose model call is replaced."""
    from halfmoon_testing.models.tiny_models import make_tiny_model

    with TemporaryDirectory() as folder:
        engine: Any = load_engine(
            str(make_tiny_model("llama", Path(folder))),
            block_size=BLOCK_SIZE,
            device="cpu",
            threads=1,
            native=mode,
        )
    call = _Call(n_vocab)
    runner = engine._runner
    if mode == "off":
        runner._model.forward = call.by_torch
    else:
        runner._decoder._decoder = SimpleNamespace(
            forward=call.natively, set_rope=runner._decoder._decoder.set_rope
        )
        runner._decoder._n_logits = n_vocab
    n_pages = max(BATCHES) * _pages_each()
    engine.attach(memoryview(bytearray(n_pages * engine.layout.block_bytes)))
    yield engine, call
    engine.detach()


def _pages_each() -> int:
    return CONTEXT // BLOCK_SIZE + 1


def _steps(n: int, sampling: Sampling) -> Callable[[], Sequence[Run]]:
    """Return a function that makes the runs of a step as the decode worker does."""
    pages = [list(range(i * _pages_each(), (i + 1) * _pages_each())) for i in range(n)]
    history = [i % 384 for i in range(CONTEXT + 1)] if sampling.needs_history else []

    def drop(_: object) -> None:
        return None

    def runs() -> Sequence[Run]:
        draw = Draw(sampling, history, CONTEXT // 2, drop)
        return [Run([7], CONTEXT, each, draw, continues=True) for each in pages]

    return runs


def _cell(
    engine: "PagedEngine", call: _Call, runs: Callable[[], Sequence[Run]], repeats: int
) -> str:
    times: list[float] = []
    for threads, clock in ((1, time.process_time), (THREADS, time.perf_counter)):
        _set_threads(threads)
        call.clock = clock
        times.append(_overhead_us(engine, call, runs, repeats))
    return " / ".join(f"{each:.0f}" for each in times)


def _set_threads(n: int) -> None:
    import torch

    torch.set_num_threads(n)
    if (native := native_extension()) is not None:
        native.set_threads(n)


def _overhead_us(
    engine: "PagedEngine", call: _Call, runs: Callable[[], Sequence[Run]], repeats: int
) -> float:
    seconds: list[float] = []
    for _ in range(repeats + 1):
        batch = runs()
        call.seconds = 0.0
        start = call.clock()
        engine.forward(batch)
        seconds.append(call.clock() - start - call.seconds)
    return sorted(seconds[1:])[repeats // 2] * 1e6
