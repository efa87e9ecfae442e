"""A run for programs: everything as JSON, requests as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from halfmoon_cli.bench.bench_run import BenchResult
from halfmoon_cli.bench.load.bench_record import BenchRecord, Slo

#: What the numbers of a JSON file mean; names end in their units.
UNITS = {
    "_s": "seconds; of a request from when it was to be sent",
    "_per_s": "per second of the run's duration",
    "tokens": "tokens, as the endpoint counts them",
    "share": "0 to 1",
}


def write_json(path: Path, results: Sequence[BenchResult], rate_per_s: float | None = None) -> None:
    """Settings and numbers of one run, or of a search's runs and the rate that it found.

    Raises:
        OSError: it can't be written.
    """
    runs = [
        {name: value for name, value in msgspec.structs.asdict(result).items() if name != "records"}
        for result in results
    ]
    data = {"units": UNITS, "runs": runs, "highest_rate_that_holds_per_s": rate_per_s}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")


_COLUMNS = (
    "index",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "ended_s",
    "outcome",
    "reason",
    "status",
    "input_tokens_asked",
    "output_tokens_asked",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "ttft_s",
    "tbt_mean_s",
    "tbt_tail_s",
    "tbt_max_s",
    "e2e_s",
    "good",
)


def write_csv(path: Path, records: Sequence[BenchRecord], slo: Slo) -> None:
    """A line for each request; moments are seconds since the start, what is unknown is empty.

    Raises:
        OSError: it can't be written.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(_row(record, slo) for record in records)


def _row(record: BenchRecord, slo: Slo) -> list[object]:
    return [
        record.index,
        _time(record.scheduled_s),
        _time(record.sent_s),
        _time(record.first_s),
        _time(record.ended_s),
        record.outcome,
        record.reason,
        record.status,
        record.asked_input,
        record.asked_output,
        record.n_prompt,
        record.n_cached,
        record.n_out,
        _time(record.ttft_s),
        _time(record.tbt_s),
        _time(record.tbt_tail_s),
        _time(record.tbt_by("max")),
        _time(record.e2e_s),
        int(not slo.missed(record)),
    ]


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.6f}"
