"""Reading traces: what is accepted, and what a refusal says."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from halfmoon_simulator.workloads import traces
from halfmoon_simulator.workloads.traces import (
    BadTrace,
    KnownTrace,
    TraceRequest,
    describe_trace,
    identify_trace,
    read_trace,
    trace_statistics,
)

GOOD = {"timestamp": 0, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "some.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    more = {"timestamp": 3000, "priority": -2, "ttft_slo_s": 2}
    plain, request = read_trace(write(tmp_path, GOOD, {**GOOD, **more}))
    assert (request.at_s, request.n_input, request.n_output) == (3.0, 1025, 5)
    assert request.blocks == (0, 1, 2)
    assert (plain.priority, plain.ttft_slo_s) == (0, None)
    assert (request.priority, request.ttft_slo_s) == (-2, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ttft_slo_s": 0}, ["ttft_slo_s", "0"]),
        ({"ttft_slo_s": "soon"}, ["ttft_slo_s", "'soon'"]),
        ({"input_length": "7"}, ["input_length", "'7'"]),
        ({"input_length": 0}, ["input_length", "0"]),
        ({"output_length": None}, ["output_length", "None"]),
        ({"output_length": True}, ["output_length", "True"]),
        ({"timestamp": -1}, ["timestamp", "-1"]),
        ({"timestamp": "soon"}, ["timestamp", "'soon'"]),
        ({"priority": 1.5}, ["priority", "1.5"]),
        ({"hash_ids": [0, 1]}, ["hash_ids", "2 ids", "1025", "3 blocks"]),
        ({"hash_ids": [0, 1, 1]}, ["hash_ids", "[0, 1, 1]"]),
        ({"hash_ids": [0, 1, -2]}, ["hash_ids", "-2"]),
        ({"hash_ids": 7}, ["hash_ids", "7"]),
        ({"hash_ids": [0, 1, 1 << 128]}, ["hash_ids", str(1 << 128), "below"]),
        ({"session_id": 7}, ["session_id", "7"]),
    ],
)
def test_a_bad_field_is_named_with_line_and_value(
    tmp_path: Path, change: dict[str, Any], named: list[str]
) -> None:
    path = write(tmp_path, GOOD, {**GOOD, **change})
    with pytest.raises(BadTrace) as refused:
        read_trace(path)
    for part in ["some.jsonl line 2", *named]:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["{"], "line 1"),
        (["[1]"], "line 1"),
        (["7"], "line 1"),
        ([""], "no request"),
        (
            [{**GOOD, "timestamp": 3000}, {**GOOD, "timestamp": 2000}],
            r"line 2: timestamp is 2000\.0.*3000 ms",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, rows: list[Any], reason: str) -> None:
    with pytest.raises(BadTrace, match=reason):
        read_trace(write(tmp_path, *rows))


def test_further_turns_of_a_session_have_delays_instead_of_timestamps(tmp_path: Path) -> None:
    turn = {"input_length": 5, "output_length": 1, "hash_ids": [0], "session_id": "s"}
    path = write(
        tmp_path, {**turn, "timestamp": 1000}, {**turn, "delay_ms": 250}, GOOD | {"timestamp": 2000}
    )
    first, second, other = read_trace(path)
    assert (first.session, first.at_s) == ("s", 1.0)
    assert (second.session, second.at_s) == ("s", 0.25)
    assert other.session is None


def test_a_published_file_is_recognised_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, GOOD)
    data = path.read_bytes()
    by_sha = KnownTrace("one", "some.jsonl", sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(traces, "KNOWN_TRACES", (by_sha,))
    assert identify_trace(path) == by_sha
    assert "published one trace" in describe_trace(path)
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    by_blob = KnownTrace("two", "some.jsonl", git_blob=blob)
    monkeypatch.setattr(traces, "KNOWN_TRACES", (by_blob,))
    assert identify_trace(path) == by_blob
    path.write_bytes(data + b"\n")
    assert identify_trace(path) is None
    assert "NOT the published file" in describe_trace(path)
    assert describe_trace(path.rename(tmp_path / "mine.jsonl")) == "mine.jsonl: a trace of your own"


def test_statistics_are_means_and_the_share_of_blocks_seen_before() -> None:
    later = TraceRequest(90.0, 10, 9, (3,), "s")  # a delay, not a time
    facts = trace_statistics(
        [TraceRequest(0.0, 20, 2, (0, 1)), TraceRequest(6.0, 30, 4, (0, 2)), later]
    )
    assert (facts.n_requests, facts.duration_s) == (3, 6.0)
    assert (facts.mean_input, facts.mean_output) == (20.0, 5.0)
    assert facts.reuse == pytest.approx(1 / 5)
    assert trace_statistics([TraceRequest(0.0, 1, 1, ())]).reuse == 0.0
