"""Writes Grafana's dashboard from the list below: `python deploy/grafana/build.py`.

A panel is a title, a unit and its queries; where it stands and how it looks is the same for all.
Names and labels are checked against live services by tests/e2e/test_dashboards.py.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent / "dashboards/halfmoon.json"
_DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 7
_WINDOW = "$__rate_interval"


class Panel(NamedTuple):
    """One graph."""

    title: str
    unit: str
    #: Legend → query.
    queries: dict[str, str]
    about: str = ""
    stacked: bool = False


def quantiles(name: str, *by: str, q: tuple[float, ...] = (0.5, 0.9, 0.99)) -> dict[str, str]:
    """Of a histogram, over all services or by some labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return {
        f"p{each * 100:.0f} {legend}".strip(): (
            f"histogram_quantile({each}, sum by ({', '.join(('le', *by))})"
            f" (rate({name}_bucket[{_WINDOW}])))"
        )
        for each in q
    }


def means(name: str, by: str) -> dict[str, str]:
    """Of a histogram, by a label."""
    total, count = (f"sum by ({by}) (rate({name}_{part}[{_WINDOW}]))" for part in ("sum", "count"))
    return {f"{{{{{by}}}}}": f"{total} / {count}"}


def rates(name: str, *by: str) -> dict[str, str]:
    """Of a counter, by labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return {legend: f"sum by ({', '.join(by)}) (rate({name}[{_WINDOW}]))"}


def sums(name: str, *by: str) -> dict[str, str]:
    """Of a gauge, by labels."""
    return {" ".join(f"{{{{{label}}}}}" for label in by): f"sum by ({', '.join(by)}) ({name})"}


def each(expression: str) -> dict[str, str]:
    """One line per process."""
    return {"{{job}} {{instance}}": expression}


ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel("Time to first token", "s", quantiles("halfmoon_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("halfmoon_inter_token_latency_seconds")),
        Panel("Whole requests", "s", quantiles("halfmoon_e2e_request_latency_seconds")),
        Panel("Requests by status", "reqps", rates("halfmoon_http_requests_total", "status")),
        Panel(
            "Tokens",
            "short",
            {
                "prompts": f"sum(rate(halfmoon_prompt_tokens_total[{_WINDOW}]))",
                "of them cached": f"sum(rate(halfmoon_prompt_tokens_cached_total[{_WINDOW}]))",
                "generated": f"sum(rate(halfmoon_generation_tokens_total[{_WINDOW}]))",
            },
            about="per second",
        ),
        Panel(
            "Refused, by reason",
            "reqps",
            rates("halfmoon_rejections_total", "reason")
            | {
                "before parsing: {{reason}}": (
                    f"sum by (reason) (rate(halfmoon_http_rejections_total[{_WINDOW}]))"
                )
            },
        ),
        Panel("Requests by phase", "none", sums("halfmoon_requests", "phase"), stacked=True),
        Panel(
            "Endings",
            "reqps",
            rates("halfmoon_request_success_total", "finished_reason")
            | {
                "placed again": f"sum(rate(halfmoon_request_retries_total[{_WINDOW}]))",
                "failed": f"sum(rate(halfmoon_requests_failed_total[{_WINDOW}]))",
            },
        ),
        Panel(
            "Lengths, median",
            "none",
            {
                "prompt": quantiles("halfmoon_request_prompt_tokens", q=(0.5,))["p50"],
                "of it computed": quantiles("halfmoon_request_computed_tokens", q=(0.5,))["p50"],
                "answer": quantiles("halfmoon_request_generation_tokens", q=(0.5,))["p50"],
            },
            about="tokens",
        ),
    ],
    "Where the time goes": [
        Panel(
            "The first token, by stage",
            "s",
            means("halfmoon_ttft_stage_seconds", "stage"),
            about="Means; they add up to the mean time to first token.",
            stacked=True,
        ),
        Panel(
            "Stages, p99",
            "s",
            quantiles("halfmoon_ttft_stage_seconds", "stage", q=(0.99,)),
        ),
        Panel(
            "First decode",
            "s",
            quantiles("halfmoon_first_decode_seconds"),
            about="From the first token, which is prefill's, to the second.",
        ),
        Panel(
            "Waiting, prefill, decode",
            "s",
            {
                "waiting p90": quantiles("halfmoon_request_queue_seconds", q=(0.9,))["p90"],
                "prefill p90": quantiles("halfmoon_request_prefill_seconds", q=(0.9,))["p90"],
                "decode p90": quantiles("halfmoon_request_decode_seconds", q=(0.9,))["p90"],
            },
        ),
        Panel(
            "Observed over predicted, mean",
            "none",
            means("halfmoon_prediction_error_ratio", "quantity"),
            about="1 is right, 2 took twice as long.",
        ),
        Panel(
            "Observed over predicted, p90",
            "none",
            quantiles("halfmoon_prediction_error_ratio", "quantity", q=(0.9,)),
        ),
    ],
    "Prefill and decode": [
        Panel("Prefill: tokens that wait", "none", each("halfmoon_prefill_queued_tokens")),
        Panel(
            "Prefill: waits by stage, mean", "s", means("halfmoon_prefill_stage_seconds", "stage")
        ),
        Panel("Prefill: tokens", "short", rates("halfmoon_prefill_tokens_total", "source")),
        Panel("Decode: a step", "s", quantiles("halfmoon_decode_step_seconds")),
        Panel("Decode: requests in a step", "none", quantiles("halfmoon_decode_batch_requests")),
        Panel(
            "Decode: given up, by reason",
            "reqps",
            rates("halfmoon_decode_failures_total", "reason"),
        ),
        Panel("Decode: requests", "none", sums("halfmoon_decode_requests", "state")),
        Panel("Pages", "none", sums("halfmoon_pages", "job", "state"), stacked=True),
        Panel(
            "Pages in use",
            "percentunit",
            {"{{role}}": "max by (role) (halfmoon_kv_cache_usage_ratio)"},
        ),
    ],
    "The pool of KV blocks": [
        Panel(
            "Prompts' tokens, by where their KV is from",
            "short",
            rates("halfmoon_prefilled_tokens_total", "source"),
            stacked=True,
        ),
        Panel(
            "Blocks asked for, by the tier that had them",
            "short",
            rates("halfmoon_kvstore_lookup_blocks_total", "tier"),
            stacked=True,
        ),
        Panel(
            "Full",
            "percentunit",
            {
                "{{tier}} {{instance}}": (
                    "halfmoon_kvstore_used_bytes / (halfmoon_kvstore_capacity_bytes > 0)"
                )
            },
        ),
        Panel("Bytes held", "bytes", sums("halfmoon_kvstore_used_bytes", "tier")),
        Panel("Blocks by state", "none", sums("halfmoon_kvstore_blocks", "tier", "state")),
        Panel(
            "Blocks read, pinned, coming back",
            "none",
            {
                "leased": "sum(halfmoon_kvstore_leased_blocks)",
                "pinned, {{kind}}": "sum by (kind) (halfmoon_kvstore_pinned_blocks)",
                "promoting": "sum(halfmoon_kvstore_promoting_blocks)",
            },
        ),
        Panel("Blocks moved", "short", rates("halfmoon_kvstore_moved_blocks_total", "move")),
        Panel(
            "Cached prefixes, by the replica they were read from",
            "short",
            rates("halfmoon_prefill_cached_reads_total", "replica"),
        ),
        Panel(
            "What is wrong",
            "short",
            {
                "damaged blocks": f"sum(rate(halfmoon_kvstore_damaged_blocks_total[{_WINDOW}]))",
                "failed writes": (
                    f"sum(rate(halfmoon_kvstore_disk_write_failures_total[{_WINDOW}]))"
                ),
                "disks off": "sum(halfmoon_kvstore_disk_off)",
                "kvstores left out": "sum(halfmoon_prefill_kvstores_paused)",
            },
        ),
    ],
    "Transfers and events": [
        Panel(
            "Bytes moved, by path",
            "Bps",
            rates("halfmoon_transfer_bytes_total", "path", "op"),
            about="Counted by whoever moves them.",
        ),
        Panel(
            "Transfers that failed, slices tried again, bytes that came damaged",
            "short",
            {
                "failed": f'sum(rate(halfmoon_transfers_total{{result="failed"}}[{_WINDOW}]))',
                "tried again": f"sum(rate(halfmoon_transfer_retries_total[{_WINDOW}]))",
                "damaged": f"sum(rate(halfmoon_transfer_corrupted_total[{_WINDOW}]))",
            },
        ),
        Panel(
            "Transfers under way",
            "none",
            sums("halfmoon_transfers_live", "job")
            | {"connections {{job}}": "sum by (job) (halfmoon_transfer_connections)"},
        ),
        Panel("KV events: lag", "s", quantiles("halfmoon_kv_event_lag_seconds")),
        Panel(
            "KV events: messages behind",
            "none",
            {"{{kvstore}}": "max by (kvstore) (halfmoon_kv_events_behind)"},
        ),
        Panel(
            "KV events: published, snapshots",
            "short",
            {
                "published": f"sum(rate(halfmoon_kvstore_event_batches_total[{_WINDOW}]))",
                "snapshots": f"sum(rate(halfmoon_kv_snapshots_total[{_WINDOW}]))",
            },
        ),
    ],
    "Processes": [
        Panel("Workers", "none", {"{{role}}": "max by (role) (halfmoon_workers)"}),
        Panel("Age of the lease", "s", each("halfmoon_membership_lease_age_seconds")),
        Panel(
            "Lateness of the event loop, p99",
            "s",
            quantiles("halfmoon_event_loop_lag_seconds", "job", "instance", q=(0.99,)),
        ),
        Panel("Messages dropped", "short", rates("halfmoon_dropped_messages_total", "reason")),
        Panel("Processors", "none", each(f"rate(process_cpu_seconds_total[{_WINDOW}])")),
        Panel("Memory", "bytes", each("process_resident_memory_bytes")),
    ],
}


def dashboard() -> dict[str, Any]:
    """All of it, as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, _COLUMNS)
            at = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, at))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": "halfmoon",
        "title": "Halfmoon",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "tags": ["halfmoon"],
        "templating": {"list": []},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    stacking = {"stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": at,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {"fillOpacity": 8, "showPoints": "never", **stacking},
            },
            "overrides": [],
        },
        "options": {
            "tooltip": {"mode": "multi"},
            "legend": {"displayMode": "list", "placement": "bottom"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def written() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(written())
