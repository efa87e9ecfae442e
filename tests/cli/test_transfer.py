"""`halfmoon transfer bench`."""

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.transfer_bench import Load, run_bench


@pytest.mark.parametrize(("backend", "threads"), [("shm", 1), ("tcp", 2)])
def test_it_measures_a_path_to_another_process(backend: str, threads: int) -> None:
    load = Load(backend=backend, block_bytes=4096, batch=4, threads=threads, seconds=0.1)
    figures = run_bench(load)
    assert figures.gb_per_s > 0
    assert 0 < figures.p50_us <= figures.p99_us


def test_the_command_prints_it_and_names_what_it_does_not_know() -> None:
    shown = CliRunner().invoke(
        app, ["transfer", "bench", "--backend=shm", "--op=read", "--seconds=0.1"]
    )
    assert shown.exit_code == 0
    assert "GB/s" in shown.output
    unknown = CliRunner().invoke(app, ["transfer", "bench", "--backend=pigeon"])
    assert unknown.exit_code == 2
    assert "no backend 'pigeon'" in unknown.output
