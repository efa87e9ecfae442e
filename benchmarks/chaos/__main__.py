"""Run a cluster of real processes under faults, and check every answer.

    make chaos MINUTES=60
    python -m benchmarks.chaos --minutes 10 --seed 7

Two conductors, two prefill and two decode workers and two kvstores with disks serve a tiny model.
Redis is their metadata server. Clients send requests all the time. Meanwhile services are killed,
stopped for a while (SIGSTOP) or restarted, and Redis is killed, emptied, paused or cut off.
Connections between services are delayed, throttled, held, cut and damaged. Disks become full.

Every answer is compared with that of transformers, token for token. Every request has to end in
its tokens or in a named error. After the last fault every answer has to be right, and nothing may
be held. The exit status is 1 if any of this does not hold. Then the folder with all logs stays,
and its name is printed. Ctrl-C ends the faults early; the checks and the table still follow. The
seed draws the faults and the requests; their order is the machine's.
"""

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.chaos.answer_check import Verdict
from benchmarks.chaos.chaos_clients import ChaosClients
from benchmarks.chaos.chaos_cluster import (
    KVSTORES,
    LINKS,
    RACKS,
    SERVICES,
    TRANSFER_LINKS,
    ChaosCluster,
)
from benchmarks.chaos.chaos_report import chaos_table
from benchmarks.chaos.fault_driver import FaultDriver
from benchmarks.chaos.fault_plan import FaultTargets, plan_faults
from benchmarks.chaos.ledger import ChaosLedger
from benchmarks.chaos.reference_answers import Question, make_questions
from halfmoon_testing.models.tiny_models import make_tiny_model

#: Seconds until all is in use at the start, until the first success after the last fault, until
#: all is in use after it, and until nothing is held.
STARTS_WITHIN_S, RECOVERS_WITHIN_S, WHOLE_WITHIN_S, GIVEN_BACK_WITHIN_S = 240.0, 60.0, 120.0, 60.0
_LOOK_S = 0.5
console = Console()


def main() -> int:
    """Run the command; return 1 after a violation."""
    options = _parser().parse_args()
    if shutil.which("redis-server") is None:
        console.print("chaos needs redis-server on the path (Debian: redis-server)")
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="halfmoon-chaos-"))
    console.print(f"seed {seed}; logs are in {folder}", highlight=False)
    console.print("computing the right answers …")
    model = make_tiny_model("qwen3", folder / "model")
    questions = make_questions(model, seed)
    ledger = ChaosLedger()
    has_key = not options.no_cluster_key
    with ChaosCluster(
        model, folder, options.transfer_backends, has_key=has_key, seed=seed
    ) as cluster:
        if cluster.no_small_disks:
            console.print(f"disks are not filled: {cluster.no_small_disks}", highlight=False)
        began_s = cluster.now_s()
        asyncio.run(_run(cluster, ledger, questions, seed, options))
        minutes = (cluster.now_s() - began_s) / 60
        ledger.effects.update(cluster.relays.counts)
    console.print(chaos_table(ledger, seed, minutes))
    for violation in ledger.violations:
        console.print(f"[red]violation:[/red] {violation}", highlight=False)
    if ledger.violations:
        console.print(f"seed {seed}; logs and faults.log are in {folder}", highlight=False)
        return 1
    if options.logs is None:
        shutil.rmtree(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="of faults (default: 10)")
    add("--seed", type=int, help="of faults and requests (default: drawn, and printed)")
    add("--every", type=float, default=6.0, help="mean seconds between two faults (default: 6)")
    add("--clients", type=int, default=6, help="that send one request after another (default: 6)")
    add("--transfer-backends", default="shm,tcp", help="of all services (default: shm,tcp)")
    add(
        "--no-cluster-key",
        action="store_true",
        help="no encryption between services, and no damaged bytes, which they would not notice",
    )
    add(
        "--logs",
        type=Path,
        help="folder for logs, which stays (default: one that a success removes)",
    )
    return parser


async def _run(
    cluster: ChaosCluster,
    ledger: ChaosLedger,
    questions: list[Question],
    seed: int,
    options: argparse.Namespace,
) -> None:
    with (
        Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as progress,
        (cluster.folder / "faults.log").open("a", buffering=1) as log,
    ):
        bar = progress.add_task("starting", total=options.minutes * 60)

        def say(text: str) -> None:
            log.write(text + "\n")
            progress.console.print(text, style="dim", highlight=False)

        async def show(began_s: float) -> None:
            while True:
                done_s = cluster.now_s() - began_s
                progress.update(bar, completed=done_s, description=_summary(ledger))
                await asyncio.sleep(_LOOK_S)

        driver = FaultDriver(cluster, ledger, say)
        clients = ChaosClients(cluster, ledger, questions)

        def end_early() -> None:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)  # a second one ends all
            say("no further faults; the checks and the table follow")
            driver.end_early()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, end_early)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(driver.watch())]
            if await _until(cluster.all_is_used, STARTS_WITHIN_S):
                began_s = cluster.now_s()
                beside.append(tasks.create_task(show(began_s)))
                load = tasks.create_task(clients.run(seed, options.clients))
                faults = plan_faults(
                    seed, options.minutes * 60, _targets(cluster, options), options.every
                )
                await driver.run(faults, began_s)
                ledger.on_calm(cluster.now_s())
                say(f"{cluster.now_s() - began_s:7.1f} s  all faults are over")
                await _check_recovery(cluster, ledger)
                clients.end()
                await load
                await _check_whole(cluster, ledger, clients)
            else:
                ledger.violations.append("the cluster did not start")
            for task in beside:
                task.cancel()
        await clients.close()


def _targets(cluster: ChaosCluster, options: argparse.Namespace) -> FaultTargets:
    return FaultTargets(
        SERVICES,
        links=tuple(LINKS),
        disks=() if cluster.no_small_disks else KVSTORES,
        safe_links=() if options.no_cluster_key else TRANSFER_LINKS,
        racks=RACKS,
    )


async def _check_recovery(cluster: ChaosCluster, ledger: ChaosLedger) -> None:
    """Wait for a success and for all services, with the load going on."""
    if not await _until(lambda: ledger.recovery_s is not None, RECOVERS_WITHIN_S):
        ledger.violations.append(f"no success within {RECOVERS_WITHIN_S:.0f} s of the last fault")
    if not await _until(cluster.all_is_used, WHOLE_WITHIN_S):
        ledger.violations.append(
            f"a conductor does not use all workers {WHOLE_WITHIN_S:.0f} s after the last fault"
        )


async def _check_whole(cluster: ChaosCluster, ledger: ChaosLedger, clients: ChaosClients) -> None:
    """Check that every answer is right, and that nothing is held afterwards."""
    named = ledger.verdicts[Verdict.NAMED]
    await clients.ask_everything()
    if n := ledger.verdicts[Verdict.NAMED] - named:
        ledger.violations.append(f"{n} requests got errors although all services are up")
    if not await _until(lambda: not cluster.held(), GIVEN_BACK_WITHIN_S):
        ledger.violations += cluster.held()


async def _until(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait for a condition; return whether it came about."""
    ends_s = asyncio.get_running_loop().time() + within_s
    while not await asyncio.to_thread(condition):
        if asyncio.get_running_loop().time() > ends_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


def _summary(ledger: ChaosLedger) -> str:
    counts = ledger.verdicts
    wrong = f" · [red]{len(ledger.violations)} violations[/red]" if ledger.violations else ""
    return (
        f"{ledger.faults.total()} faults · {counts[Verdict.RIGHT]} right ·"
        f" {counts[Verdict.NAMED]} named errors · {counts[Verdict.BROKEN]} broken{wrong}"
    )


if __name__ == "__main__":
    sys.exit(main())
