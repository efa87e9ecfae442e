"""Drive an engine as prefill and decode do, and name what fixtures of these tests give."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halfmoon_engine.interface import Draw, Engine, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling, Stopping
from tests.engine.chained_engine import ChainedEngine

#: The folder of the tiny model of an architecture.
Tiny = Callable[[str], Path]
EngineOf = Callable[..., Any]
Reference = Callable[..., list[int]]


def prompt_of(n: int) -> list[int]:
    """A prompt of that many tokens, always the same."""
    dice = random.Random(n)
    return [dice.randrange(3, 384) for _ in range(n)]


def generated(model: Any, prompt: Sequence[int], n: int, **options: Any) -> list[int]:
    """Greedy output of `generate` of a model of transformers, with its options."""
    import torch

    ids = torch.tensor([list(prompt)])
    usual = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": n}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **{**usual, **options})
    return [int(token) for token in out[0, len(prompt) :]]


def open_tiny(folder: Path | str, **options: Any) -> Any:
    """An engine in float32 on one thread, unless options say otherwise."""
    usual = {"block_size": 16, "dtype": "float32", "device": "cpu", "threads": 1}
    return open_engine(str(folder), **{**usual, **options})


class Driver:
    """An engine over a pool of its own, with pages handed out in random order."""

    #: Whether its runs say that they go on where the engine left off.
    continues = False

    def __init__(
        self,
        engine: Engine | ChainedEngine,
        n_tokens: int,
        seed: int = 0,
        new_pool: Callable[[int], Any] = bytearray,
    ) -> None:
        self.engine: Any = engine
        self.n_pages = engine.layout.blocks_for(n_tokens) + 8
        n_bytes = self.n_pages * engine.layout.block_bytes
        self.pool = new_pool(n_bytes)
        # Garbage that no correct computation survives: the pool's unused slots are NaN.
        self.pool[:] = b"\xff" * n_bytes
        engine.attach(memoryview(self.pool))
        self._free = list(range(self.n_pages))
        random.Random(seed).shuffle(self._free)

    def pages_for(self, n_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(self.engine.layout.blocks_for(n_tokens))]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)

    def page_bytes(self, page: int) -> memoryview:
        size = self.engine.layout.block_bytes
        return memoryview(self.pool)[page * size : (page + 1) * size]

    def generate(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        chunk: int = 512,
        cached: int = 0,
        pages: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
    ) -> list[int]:
        """Prefill from position `cached` on in chunks, then decode, to `n` new tokens.

        Stop tokens are masked as `stopping` says, and end nothing.
        """
        sampling = sampling or Sampling(temperature=0.0)
        own = self.pages_for(len(prompt) + n) if pages is None else list(pages)
        tokens, start = list(prompt), cached
        while len(tokens) < len(prompt) + n:
            part = tokens[start : start + chunk]
            last = start + len(part) == len(tokens)
            masked = stopping.masked_after(len(tokens) - len(prompt)) if stopping else ()
            draw = Draw(sampling, tuple(tokens), len(prompt), masked=masked) if last else None
            goes_on = self.continues and start > cached
            (token,) = self.engine.forward([Run(part, start, own, draw, goes_on)])
            start += len(part)
            if last:
                assert isinstance(token, int)
                tokens.append(token)
        if pages is None:
            self.free(own)
        return tokens[len(prompt) :]
