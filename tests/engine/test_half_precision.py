"""In half precision, logits are as near to float32's as those of transformers' own attention."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as untyped_transformers
from numpy.typing import NDArray

from halfmoon_engine.attention.kv_pool import TORCH_DTYPES
from halfmoon_engine.interface import PromptScoring, Run
from halfmoon_protocol.kv_layout import DType
from halfmoon_testing.models.tiny_architectures import TINY_VOCAB_SIZE
from halfmoon_testing.models.tiny_models import ARCHITECTURES
from tests.engine.driver import Driver, EngineOf, Tiny, prompt_of

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
