"""Write a run's verdicts as JSON and as JUnit's XML."""

from collections import Counter
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import msgspec

from halfmoon_conform.check import Check
from halfmoon_conform.verdict import Verdict


def as_json(verdicts: Sequence[Verdict], checks: Mapping[str, Check], role: str) -> bytes:
    """Return the verdicts as one JSON object."""
    counts = Counter(verdict.status for verdict in verdicts)
    rows = [
        {
            "id": verdict.check_id,
            "status": verdict.status,
            # A subject's text may hold half a surrogate pair, which is no UTF-8.
            "reason": verdict.reason.encode(errors="replace").decode(),
            "seconds": round(verdict.seconds, 3),
            "says": " ".join(checks[verdict.check_id].says.split()),
        }
        for verdict in verdicts
    ]
    document = {"service": role, "counts": dict(counts), "checks": rows}
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def as_junit(verdicts: Sequence[Verdict], checks: Mapping[str, Check], role: str) -> bytes:
    """Return the verdicts as a test suite; known failures count as skipped."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"halfmoon conform {role}",
        tests=str(len(verdicts)),
        failures=str(sum(v.status in ("failed", "unexpected_pass") for v in verdicts)),
        skipped=str(sum(v.status in ("skipped", "known") for v in verdicts)),
        time=f"{sum(v.seconds for v in verdicts):.3f}",
    )
    for verdict in verdicts:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"conform.{role}",
            name=verdict.check_id,
            time=f"{verdict.seconds:.3f}",
        )
        says = " ".join(checks[verdict.check_id].says.split())
        if verdict.status in ("failed", "unexpected_pass"):
            failure = ElementTree.SubElement(case, "failure", message=_printable(verdict.reason))
            failure.text = f"the protocol says: {says}"
        elif verdict.status in ("skipped", "known"):
            ElementTree.SubElement(case, "skipped", message=_printable(verdict.reason))
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"


def _printable(text: str) -> str:
    """Return a text without the control characters that XML can't hold."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
