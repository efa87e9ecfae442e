"""`halfmoon transfer bench`."""

import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.transfer.bandwidth_bench import (
    TransferLoad,
    run_bandwidth_bench_against,
)
from halfmoon_cli.transfer.bandwidth_target import serve_target
from halfmoon_metadata import MemoryStore
from halfmoon_transfer import Lost

SMALL = TransferLoad(block_bytes=4096, batch=4, threads=2, seconds=0.1)


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
def test_it_measures_a_path_to_a_target_elsewhere(bind: str) -> None:
    store = MemoryStore()
    try:
        target = serve_target(store, "far", backend="tcp", n_bytes=100_000, bind=bind, advertise="")
        with target as engine:
            assert run_bandwidth_bench_against(SMALL, store, "far", bind=bind).gb_per_s > 0
            assert engine.stats().n_regions == 1
    except OSError as error:
        if bind == "::1":
            pytest.skip(f"this machine has no IPv6 loopback: {error}")
        raise
    assert store.list("halfmoon/bench/") == {}


def test_a_target_that_is_not_there_or_too_small_is_told_with_what_to_do() -> None:
    store = MemoryStore()
    with serve_target(store, "far", backend="tcp", n_bytes=100, bind="127.0.0.1", advertise=""):
        with pytest.raises(ValueError, match=r"no target 'near'; known: far\. Start one"):
            run_bandwidth_bench_against(SMALL, store, "near")
        with pytest.raises(ValueError, match=r"has 100 bytes and 32768 are needed.*--size-mib"):
            run_bandwidth_bench_against(SMALL, store, "far")


def test_a_wrong_advertised_address_of_the_target_is_named() -> None:
    store = MemoryStore()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
    with (
        serve_target(
            store, "far", backend="tcp", n_bytes=100_000, bind="127.0.0.1", advertise=dead
        ),
        pytest.raises(Lost, match=f"segment far at {dead} .set by advertise="),
    ):
        run_bandwidth_bench_against(SMALL, store, "far")


def test_two_commands_measure_together_if_they_have_the_same_cluster_key(
    metadata_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "the moon is made of green cheese")
    target = ["transfer", "target", f"--metadata={metadata_url}", "--size-mib=16"]
    command = [sys.executable, "-m", "halfmoon_cli", *target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as far:
        try:
            assert far.stdout is not None
            assert "target bench-target at 127.0.0.1:" in far.stdout.readline()
            bench = ["transfer", "bench", f"--metadata={metadata_url}", "--seconds=0.1"]
            shown = CliRunner().invoke(app, bench)
            assert shown.exit_code == 0, shown.output
            assert "GB/s" in shown.output
            assert "this side" in shown.output
            monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "the moon is made of blue cheese")
            refused = CliRunner().invoke(app, bench)
            assert refused.exit_code == 2
            assert "another cluster key" in " ".join(refused.output.split())
            far.terminate()
            assert far.wait(60) == 0
        finally:
            far.kill()


def test_the_command_prints_it_and_names_what_it_does_not_know() -> None:
    shown = CliRunner().invoke(
        app, ["transfer", "bench", "--backend=shm", "--op=read", "--seconds=0.1"]
    )
    assert shown.exit_code == 0
    assert "GB/s" in shown.output
    unknown = CliRunner().invoke(app, ["transfer", "bench", "--backend=pigeon"])
    assert unknown.exit_code == 2
    assert "no backend 'pigeon'" in unknown.output
