"""Define `halfmoon sim-cluster`: run the real services by a virtual clock, seed after seed.

The simulation imports services, which this command does not. So it runs as a process of its own.
"""

import importlib.util
import subprocess
import sys
from typing import Annotated

import typer

_MODULE = "halfmoon_testing.sim_cluster"


def sim_cluster(
    seed: Annotated[
        int | None, typer.Option(min=0, help="Run this seed again, with the same log")
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds to run, as FIRST:END without END itself")
    ] = "0:100",
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run seeds")] = 1,
    log: Annotated[
        bool, typer.Option("--log", help="Print the whole log of the run, with --seed")
    ] = False,
    violations: Annotated[
        int, typer.Option(min=1, help="Stop after so many seeds in which an invariant did not hold")
    ] = 10,
) -> None:
    """Search for faults that break a promise: real services, a virtual clock, seeded faults.

    Each seed is a cluster, its requests, and what goes wrong: killed and paused processes, cut
    networks, lost and damaged bytes, failing disks, a metadata server that loses its records.
    After it the invariants must hold. The exit status is 1 if one did not.
    """
    if importlib.util.find_spec("halfmoon_testing") is None:
        typer.echo(
            "halfmoon sim-cluster needs the package halfmoon-testing:"
            " install libs/testing, or run it from a checkout after `make test`",
            err=True,
        )
        raise typer.Exit(2)
    which = ["--seeds", seeds] if seed is None else ["--seed", str(seed)]
    command = [sys.executable, "-m", _MODULE, *which, "--jobs", str(jobs)]
    command += ["--violations", str(violations), *(["--log"] if log else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
