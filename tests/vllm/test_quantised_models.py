"""Quantised checkpoints: vLLM decides which it computes, and computes them as it does alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon_engine.interface import Engine
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import UnsupportedModel
from tests.vllm.conftest import BLOCK_SIZE, prompt_of
from tests.vllm.quantised_models import make_quantised_models

#: Formats whose kernels vLLM has for CPUs with AVX-512 alone.
INT4 = ("gptq", "awq", "compressed-int4")
#: Formats that vLLM's build for CPUs computes.
SERVED = (*INT4, "compressed-int8", "compressed-fp8")
N_NEW = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return make_quantised_models(tmp_path_factory.mktemp("quantised"))


@pytest.fixture(scope="module")
def stock(folders: Mapping[str, Path]) -> dict[str, Any]:
    """What stock vLLM answers, in a process of its own, by format."""
    program = Path(__file__).parent / "stock_generate.py"
    arguments = [json.dumps(prompt_of(100)), str(N_NEW), str(BLOCK_SIZE)]
    done = subprocess.run(
        [sys.executable, program, *arguments, *map(str, folders.values())],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"/')]
    answers = {folder: answer for line in lines for folder, answer in line.items()}
    return {name: answers[str(folder)] for name, folder in folders.items()}


def load(folder: Path, engine: str) -> Engine:
    options = {"enforce_eager": "true"} if engine == "vllm" else {}
    return open_engine(
        str(folder),
        block_size=BLOCK_SIZE,
        device="cpu",
        threads=1,
        engine=engine,
        engine_options=options,
    )


@pytest.mark.parametrize("form", SERVED)
def test_a_quantised_model_gives_the_tokens_of_stock_vllm_or_is_refused_where_it_lacks_a_kernel(
    form: str,
    folders: Mapping[str, Path],
    stock: dict[str, Any],
    reference: object,  # before vLLM is imported: it changes classes of transformers
    make_pool: Callable[..., Any],
) -> None:
    if form in INT4 and not torch.cpu._is_avx512_supported():
        assert "cpu_gemm_wna16" in stock[form]
        with pytest.raises(UnsupportedModel, match=r"can't be computed by vllm.*cpu_gemm_wna16"):
            load(folders[form], "vllm")
        return
    pool = make_pool(load(folders[form], "vllm"))
    assert pool.generate(prompt_of(100), N_NEW, chunk=64) == stock[form]
    assert pool.engine.layout.dtype == "bfloat16"
    assert len(set(stock[form])) > 4


def test_what_vllm_does_not_compute_is_refused_with_its_own_words(
    folders: Mapping[str, Path], stock: dict[str, Any], reference: object
) -> None:
    assert isinstance(stock["fp8"], str)
    with pytest.raises(UnsupportedModel, match="can't be computed by vllm") as refused:
        load(folders["fp8"], "vllm")
    assert "static_scaled_fp8_quant" in str(refused.value)
    assert "static_scaled_fp8_quant" in stock["fp8"]


@pytest.mark.parametrize("form", SERVED)
def test_torch_refuses_a_quantised_model_by_name(form: str, folders: Mapping[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="is quantised with"):
        load(folders[form], "torch")
