"""Greedy float32 output equals transformers' `generate`, whatever the way to it.

In half precision, logits are as near to float32's as those of transformers' own attention. The tiny
models of these tests can show a fault: each of their weights matters, and so does the context.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as untyped_transformers
from numpy.typing import NDArray

from halfmoon_engine.attention.kv_pool import TORCH_DTYPES
from halfmoon_engine.interface import Draw, PromptScoring, Run
from halfmoon_protocol.kv_layout import DType
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_testing.models.tiny_architectures import TINY_VOCAB_SIZE
from halfmoon_testing.models.tiny_models import ARCHITECTURES
from tests.engine.driver import Driver, EngineOf, Reference, Tiny, prompt_of
from tests.nightly import by_day

#: More than one chunk of the longest, and many pages.
LONG = by_day(700, at_night=2000)
LENGTHS = (1, 15, 16, 17, 100, LONG)
_NIGHT = pytest.mark.nightly("greedy tokens of each architecture equal in blocks of 64, one by one")
#: Large blocks and single tokens are a matter of pages and not of models: two show it by day.
_SHOWN = ("llama", "gemma2")
ARCHITECTURES_AND_BLOCKS = [
    *((arch, 16) for arch in ARCHITECTURES),
    *((arch, size) for arch in _SHOWN for size in (64, 512)),
    *(pytest.param(arch, 64, marks=_NIGHT) for arch in ARCHITECTURES if arch not in _SHOWN),
]
CHUNKS = [
    *((arch, 16, chunk) for arch in ARCHITECTURES for chunk in (7, 512)),
    *((arch, 16, 1) for arch in _SHOWN),
    *((arch, size, 7) for arch in _SHOWN for size in (64, 512)),
    *(
        pytest.param(arch, size, chunk, marks=_NIGHT)
        for arch in ARCHITECTURES
        if arch not in _SHOWN
        for size, chunk in ((16, 1), (64, 7))
    ),
]
N_NEW = 8
GREEDY = Draw(Sampling(temperature=0.0))


@pytest.mark.parametrize(("arch", "block_size", "chunk"), CHUNKS)
def test_chunked_prefill_and_decode_equal_generate(
    arch: str, block_size: int, chunk: int, engine_of: EngineOf, reference: Reference
) -> None:
    driver = Driver(engine_of(arch, block_size), LONG + 100)
    # Token by token or nearly, the long prompt would take thousands of forwards.
    lengths = [n for n in LENGTHS if n <= 250 * chunk]
    for n in lengths:
        produced = driver.generate(prompt_of(n), N_NEW, chunk=chunk)
        assert produced == reference(arch, prompt_of(n), N_NEW), f"a prompt of {n} tokens"


@pytest.mark.parametrize("block_size", [16, pytest.param(64, marks=_NIGHT)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_batch_of_mixed_lengths_and_phases_equals_each_alone(
    arch: str, block_size: int, engine_of: EngineOf, reference: Reference
) -> None:
    engine = engine_of(arch, block_size)
    driver = Driver(engine, sum(LENGTHS) + len(LENGTHS) * (N_NEW + block_size))
    dice = random.Random(7)
    tokens = {n: prompt_of(n) for n in LENGTHS}
    pages = {n: driver.pages_for(n + N_NEW) for n in LENGTHS}
    done = dict.fromkeys(LENGTHS, 0)
    while unfinished := [n for n in LENGTHS if len(tokens[n]) < n + N_NEW]:
        chosen = dice.sample(unfinished, dice.randint(1, len(unfinished)))
        runs: list[Run] = []
        for n in chosen:
            part = tokens[n][done[n] : done[n] + dice.choice([5, 40, 600])]
            last = done[n] + len(part) == len(tokens[n])
            runs.append(Run(part, done[n], pages[n], GREEDY if last else None))
            done[n] += len(part)
        for n, token in zip(chosen, engine.forward(runs), strict=True):
            if isinstance(token, int):
                tokens[n].append(token)
    for n in LENGTHS:
        assert tokens[n][n:] == reference(arch, prompt_of(n), N_NEW), f"a prompt of {n} tokens"


@pytest.mark.parametrize(("arch", "block_size"), ARCHITECTURES_AND_BLOCKS)
def test_a_prefix_whose_kv_came_from_elsewhere_continues_the_same(
    arch: str, block_size: int, engine_of: EngineOf, reference: Reference
) -> None:
    engine = engine_of(arch, block_size)
    prompt = prompt_of(LONG)
    first = Driver(engine, LONG + 100, seed=1)
    theirs = first.pages_for(LONG)
    engine.forward([Run(prompt, 0, theirs, None)])
    layout = engine.layout
    blocks = [bytes(first.page_bytes(page)) for page in theirs]

    second = Driver(engine, LONG + 100, seed=2)
    for cached in (block_size, LONG // 512 * 512, LONG - 1):
        ours = second.pages_for(LONG + N_NEW)
        landed = ours[: cached // block_size]
        if cached == LONG - 1:  # all of the prompt but the token that must be computed
            landed = ours[: layout.blocks_for(LONG)]

        def land(layer: int, ours: list[int] = landed) -> None:
            begin = layer * layout.layer_bytes
            for page, block in zip(ours, blocks, strict=False):
                there = second.page_bytes(page)
                there[begin : begin + layout.layer_bytes] = block[
                    begin : begin + layout.layer_bytes
                ]

        # A layer lands only when it is about to be read: none may be read before.
        start = cached
        draw = GREEDY
        (token,) = engine.forward([Run(prompt[start:], start, ours, draw)], before_layer=land)
        assert isinstance(token, int)
        produced = [token]
        while len(produced) < N_NEW:
            step = Run(produced[-1:], LONG + len(produced) - 1, ours, draw)
            (token,) = engine.forward([step])
            assert isinstance(token, int)
            produced.append(token)
        assert produced == reference(arch, prompt, N_NEW), f"{cached} tokens cached"
        second.free(ours)


@pytest.mark.parametrize("n_min", [1, 4, N_NEW])
def test_an_answer_of_at_least_so_many_tokens_is_that_of_min_new_tokens(
    n_min: int, engine_of: EngineOf, reference: Reference
) -> None:
    """The model's likeliest tokens are its end tokens here, so each place would end the answer."""
    prompt = prompt_of(30)
    ends = sorted(set(reference("llama", prompt, N_NEW)))
    wanted = reference("llama", prompt, N_NEW, eos_token_id=ends, min_new_tokens=n_min)
    stopping = Stopping(max_new_tokens=N_NEW, stop_token_ids=tuple(ends), min_new_tokens=n_min)
    driver = Driver(engine_of("llama"), 100)
    assert driver.generate(prompt, len(wanted), stopping=stopping) == wanted
    assert not set(wanted[:n_min]) & set(ends)


transformers: Any = untyped_transformers
N_TOKENS = 300
#: Ends of the runs that a prompt is computed in: chunks, then decode steps.
ENDS = (100, 137, 292, *range(293, N_TOKENS + 1))
Logprobs = NDArray[np.float32]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_are_as_exact_as_theirs(
    arch: str, dtype: DType, engine_of: EngineOf, tiny: Tiny
) -> None:
    prompt = prompt_of(N_TOKENS)
    exact = own_logprobs(tiny(arch), torch.float32, prompt)
    theirs = own_logprobs(tiny(arch), TORCH_DTYPES[dtype], prompt)
    ours = paged_logprobs(Driver(engine_of(arch, 16, dtype), N_TOKENS), prompt)
    error, allowed = typical_error(ours, exact), typical_error(theirs, exact)
    assert allowed < 0.5 * float(exact.std())
    assert error <= 1.25 * allowed


def own_logprobs(folder: Path, dtype: torch.dtype, prompt: Sequence[int]) -> Logprobs:
    """Return the log probabilities after each token, [n_tokens, vocab], by transformers alone."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].float()
    logprobs: Logprobs = logits.log_softmax(dim=-1).numpy()
    return logprobs


def paged_logprobs(driver: Any, prompt: Sequence[int]) -> Logprobs:
    """Return the same by our engine, in chunks and decode steps."""
    pages = driver.pages_for(N_TOKENS)
    rows: list[Logprobs] = []

    def keep(scores: Sequence[Any]) -> None:
        for score in scores:
            row = np.empty(TINY_VOCAB_SIZE, dtype=np.float32)
            row[[token for token, _ in score.top]] = [value for _, value in score.top]
            rows.append(row)

    for start, end in zip((0, *ENDS), ENDS, strict=False):
        scoring = PromptScoring([0] * (end - start), TINY_VOCAB_SIZE, keep)
        driver.engine.forward([Run(prompt[start:end], start, pages, None, scoring=scoring)])
    return np.stack(rows)


def typical_error(logprobs: Logprobs, exact: Logprobs) -> float:
    """Return the median row's error. Some rows are far off: an expert was chosen by a hair."""
    return float(np.median(np.sqrt(np.square(logprobs - exact).mean(axis=1))))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_without_one_of_its_weights_is_another_model(arch: str, tiny: Tiny) -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny(arch), attn_implementation="eager"
    )
    tokens = torch.tensor([prompt_of(100)])
    with torch.inference_mode():
        whole = model(tokens).logits
        for name, weight in model.named_parameters():
            kept = weight.data
            weight.data = torch.ones_like(kept) if is_norm_weight(name) else torch.zeros_like(kept)
            changed = model(tokens).logits
            weight.data = kept
            moved = float((changed - whole).square().mean().sqrt() / whole.std())
            assert moved > 0.01, f"{name} of {arch} moves logits by {moved:.2g} of their spread"


def is_norm_weight(name: str) -> bool:
    return name.endswith("weight") and ("norm" in name or ".ln_" in name)
