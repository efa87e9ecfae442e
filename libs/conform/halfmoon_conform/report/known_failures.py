"""Read the file of known failures, and mark the verdicts that it lists.

One check id a line; `#` begins a comment. A listed check that passes is an error, so that the file
does not outlive its failures.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from halfmoon_conform.verdict import Verdict


class UnknownCheck(ValueError):
    """The file of known failures lists a check that does not exist."""


def read_known_failures(text: str, ids: Iterable[str]) -> frozenset[str]:
    """Return the listed ids.

    Raises:
        UnknownCheck: one is no check's.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    known = frozenset(line for line in lines if line)
    if wrong := sorted(known - set(ids)):
        raise UnknownCheck(
            f"no check {', '.join(wrong)}: `halfmoon conform --list` lists those there are"
        )
    return known


def mark_known(verdicts: Sequence[Verdict], known: frozenset[str]) -> list[Verdict]:
    """Return the verdicts with listed failures as known, and listed passes as unexpected."""
    return [_mark(verdict) if verdict.check_id in known else verdict for verdict in verdicts]


def _mark(verdict: Verdict) -> Verdict:
    if verdict.status == "failed":
        return replace(verdict, status="known")
    if verdict.status == "passed":
        return replace(verdict, status="unexpected_pass")
    return verdict
