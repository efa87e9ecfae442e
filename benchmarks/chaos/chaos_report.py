"""Show the result of a run as a table."""

from rich.table import Table

from benchmarks.chaos.answer_check import Verdict
from benchmarks.chaos.ledger import ChaosLedger


def chaos_table(ledger: ChaosLedger, seed: int, minutes: float) -> Table:
    """Return the table of a run."""
    table = Table(title=f"chaos, seed {seed}", box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    row = table.add_row
    row("minutes", f"{minutes:.1f}")
    row("faults", str(ledger.faults.total()))
    for kind, n in sorted(ledger.faults.items()):
        row(f"  {kind}", str(n))
    for end, n in sorted(ledger.own_ends.items()):
        row(f"  ended by itself: {end}", str(n))
    for effect, n in sorted(ledger.effects.items()):
        row(f"  {effect}", f"{n:,}")
    row("requests", f"{ledger.n_requests:,}")
    row("streams resumed", f"{ledger.n_resumed:,}")
    row("tokens received", f"{ledger.n_tokens:,}")
    for verdict in Verdict:
        n = ledger.verdicts[verdict]
        row(f"  {verdict.value}", f"{n:,}", style="red" if n and verdict.is_violation else None)
        if verdict is Verdict.NAMED:
            for code, n_errors in sorted(ledger.errors.items()):
                row(f"    {code}", f"{n_errors:,}")
    row("longest pause between successes", f"{ledger.longest_pause_s:.1f} s")
    row("longest pause within a stream", f"{ledger.longest_stream_pause_s:.1f} s")
    recovery_s = ledger.recovery_s
    row(
        "first success after the last fault",
        "none" if recovery_s is None else f"{recovery_s:.1f} s",
    )
    row("violations", str(len(ledger.violations)), style="red" if ledger.violations else "green")
    return table
