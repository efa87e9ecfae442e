"""Write one line a check, and the summary."""

from collections import Counter
from collections.abc import Sequence

from halfmoon_conform.check import Check
from halfmoon_conform.verdict import Status, Verdict

_MARKS = {
    "passed": "ok  ",
    "failed": "FAIL",
    "skipped": "skip",
    "known": "known",
    "unexpected_pass": "PASS?",
}


def verdict_line(verdict: Verdict, says: str) -> str:
    """Return the line of one check, and why it failed or was skipped."""
    line = f"{_MARKS[verdict.status]:5} {verdict.check_id}"
    if verdict.status in ("failed", "known"):
        line += f"\n      the protocol says: {' '.join(says.split())}\n      {verdict.reason}"
    elif verdict.status == "unexpected_pass":
        line += "  (listed as a known failure, and passed: remove it from that file)"
    elif verdict.reason:
        line += f"  ({verdict.reason})"
    return line


def summary_line(verdicts: Sequence[Verdict], seconds: float) -> str:
    """Return the last line of a run."""
    counts = Counter(verdict.status for verdict in verdicts)
    parts = [f"{counts['passed']} passed", f"{counts['failed']} failed"]
    parts += [f"{counts[s]} {w}" for s, w in _RARE.items() if counts[s]]
    return f"{', '.join(parts)} of {len(verdicts)} checks in {seconds:.1f} s"


_RARE: dict[Status, str] = {
    "skipped": "skipped",
    "known": "failed as known",
    "unexpected_pass": "passed though listed as known failures",
}


def list_lines(checks: Sequence[Check]) -> list[str]:
    """Return a line for each check: id, roles and sentence."""
    width = max((len(check.id) for check in checks), default=0)
    return [
        f"{check.id:{width}}  {','.join(check.roles)}: {' '.join(check.says.split())}"
        for check in checks
    ]
