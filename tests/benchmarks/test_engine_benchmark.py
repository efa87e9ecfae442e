"""`make bench-engine` counts what models have, and prints rows of ours; no figure is checked."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as _transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine.shapes import SHAPES, ModelShape

ROOT = Path(__file__).resolve().parents[2]
transformers: Any = _transformers


def run_module(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def model_of(shape: ModelShape) -> Any:
    config = transformers.AutoConfig.for_model(shape.kind, **shape.config())
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_shape_counts_the_parameters_of_its_model(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = model_of(shape)
    assert sum(p.numel() for p in model.parameters() if p.dim() == 2) == shape.parameters


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_shape_counts_the_operations_of_its_model(shape: ModelShape) -> None:
    small = dataclasses.replace(shape, n_layers=2, n_vocab=64)
    model = model_of(small)
    # One token: nothing is masked, so that attention is counted as it is computed.
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=False)
    rotary = small.head_dim  # an outer product of position and frequencies, which is not counted
    assert counter.get_total_flops() - small.prefill_flops(1) in (0, rotary)


@pytest.mark.parametrize(
    ("module", "flag"),
    [("benchmarks.engine", "--shapes"), ("benchmarks.goodput", "--loads")],
)
def test_an_unknown_name_is_refused_with_the_known_ones(module: str, flag: str) -> None:
    done = run_module(module, flag, "nothing-like-it", "--systems", "halfmoon")
    assert done.returncode == 1
    assert f"{flag}: no nothing-like-it; there are: " in done.stderr


@pytest.mark.nightly("`make bench-engine` measures our engine and prints its rows")
@pytest.mark.e2e
def test_the_benchmark_of_the_engine_has_our_rows(tmp_path: Path) -> None:
    chosen = ["--systems", "halfmoon", "--shapes", "llama-3.4m", "--dtypes", "float32"]
    chosen += ["--prefill", "64", "--batches", "2", "--contexts", "32", "--rounds", "1"]
    done = run_module("benchmarks.engine", *chosen, "--no-ttft", HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for label in ("prefill 64, tokens/s", "decode 2 × 32, ms a step", "after the start"):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"| {label} |")]
        assert "–" not in row, done.stdout + done.stderr
