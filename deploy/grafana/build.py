"""Write Grafana's dashboard from the list below: `python deploy/grafana/build.py`.

It is one board that is read from top to bottom, from a symptom to its cause: each row answers the
question of its title. A panel is a title, a unit and its queries; where it stands and how it looks
is the same for all. The board's variables are in every query that can have them. Names and labels
are checked against live services by tests/e2e/test_dashboards.py.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent / "dashboards/halfmoon.json"
_DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
_COLUMNS, _WIDTH, _HEIGHT, _GUIDE_HEIGHT = 3, 8, 7, 4
_WINDOW = "$__rate_interval"
#: Metrics that workers serve, or every process. All others are the conductor's alone.
_OF_WORKERS = re.compile(
    r"halfmoon_((prefill|decode|kvstore|transfers?|membership|event_loop)_|pages\b|\w+_messages_)"
    r"|process_"
)
_OF_TENANTS = re.compile(r"\w+_tenant_")
_GUIDE = """\
Read from top to bottom; each row narrows down what the row above shows.

**1** what users see → **2** what first tokens wait for → **3** what waits, and where →
**4** whether prefixes are found → **5** which worker it is → **6** what broke.

*Model* is in all rows, and *Tenant* where a panel says so. *Role* and *Worker* are in panels of
what workers measure: the conductor's own numbers are of all workers together.
"""


class Variable(NamedTuple):
    """One choice at the top of the board."""

    name: str
    label: str
    #: Lists its values.
    query: str


VARIABLES = [
    Variable("model", "Model", 'label_values(up{worker!=""}, model)'),
    Variable("role", "Role", 'label_values(up{model=~"$model|", worker!=""}, job)'),
    Variable(
        "worker", "Worker", 'label_values(up{model=~"$model|", job=~"$role", worker!=""}, worker)'
    ),
    Variable(
        "tenant", "Tenant", 'label_values(halfmoon_tenant_tokens_total{model=~"$model|"}, tenant)'
    ),
]


class Panel(NamedTuple):
    """One graph."""

    title: str
    unit: str
    #: Legend → query.
    queries: dict[str, str]
    about: str = ""
    stacked: bool = False


def chosen(name: str, *more: str) -> str:
    """Return a metric's series that the variables choose."""
    # Targets need not say their model, such as a conductor's before the first worker is there.
    matchers = ['model=~"$model|"']
    if _OF_WORKERS.match(name):
        matchers += ['job=~"$role"', 'worker=~"$worker"']
    if _OF_TENANTS.match(name):
        matchers += ['tenant=~"$tenant"']
    return f"{name}{{{', '.join((*matchers, *more))}}}"


def rate(name: str, *more: str) -> str:
    """Return a counter's rate, by series."""
    return f"rate({chosen(name, *more)}[{_WINDOW}])"


def total(name: str, *more: str) -> str:
    """Return a counter's rate over all series."""
    return f"sum({rate(name, *more)})"


def legend_of(*labels: str) -> str:
    """Return a legend that shows these labels' values."""
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def quantiles(name: str, *by: str, q: tuple[float, ...] = (0.5, 0.9, 0.99)) -> dict[str, str]:
    """Return quantiles of a histogram, over all services or by some labels."""
    return {
        f"p{each * 100:.0f} {legend_of(*by)}".strip(): (
            f"histogram_quantile({each}, sum by ({', '.join(('le', *by))})"
            f" ({rate(f'{name}_bucket')}))"
        )
        for each in q
    }


def means(name: str, by: str) -> dict[str, str]:
    """Return means of a histogram, by a label."""
    parts = (f"sum by ({by}) ({rate(f'{name}_{part}')})" for part in ("sum", "count"))
    return {legend_of(by): " / ".join(parts)}


def rates(name: str, *by: str) -> dict[str, str]:
    """Return rates of a counter, by labels."""
    return {legend_of(*by): f"sum by ({', '.join(by)}) ({rate(name)})"}


def sums(name: str, *by: str) -> dict[str, str]:
    """Return sums of a gauge, by labels."""
    return {legend_of(*by): f"sum by ({', '.join(by)}) ({chosen(name)})"}


def highest(name: str, by: str) -> dict[str, str]:
    """Return the highest values of a gauge, by a label: conductors tell the same of a cluster."""
    return {legend_of(by): f"max by ({by}) ({chosen(name)})"}


_USED_PAGES = chosen("halfmoon_pages", 'state="used"')

ROWS: dict[str, list[Panel]] = {
    "1 · Users: what do they see?": [
        Panel("Time to first token", "s", quantiles("halfmoon_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("halfmoon_inter_token_latency_seconds")),
        Panel("Whole requests", "s", quantiles("halfmoon_e2e_request_latency_seconds")),
        Panel("Requests by status", "reqps", rates("halfmoon_http_requests_total", "status")),
        Panel(
            "Refused, by reason",
            "reqps",
            rates("halfmoon_rejections_total", "reason")
            | {
                "before parsing: {{reason}}": (
                    f"sum by (reason) ({rate('halfmoon_http_rejections_total')})"
                )
            },
        ),
        Panel("Endings", "reqps", rates("halfmoon_request_success_total", "finished_reason")),
        Panel(
            "Tokens",
            "short",
            {
                "prompts": total("halfmoon_prompt_tokens_total"),
                "of them cached": total("halfmoon_prompt_tokens_cached_total"),
                "generated": total("halfmoon_generation_tokens_total"),
            },
            about="per second",
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
        Panel(
            "By tenant: time to first token, p90",
            "s",
            quantiles("halfmoon_tenant_time_to_first_token_seconds", "tenant", q=(0.9,)),
        ),
        Panel(
            "By tenant: tokens",
            "short",
            rates("halfmoon_tenant_tokens_total", "tenant", "kind"),
            about="per second",
        ),
        Panel(
            "By tenant: endings",
            "reqps",
            rates("halfmoon_tenant_request_success_total", "tenant", "finished_reason"),
        ),
        Panel(
            "By tenant: refused before parsing",
            "reqps",
            rates("halfmoon_tenant_rejections_total", "tenant", "reason"),
        ),
    ],
    "2 · First tokens: what do they wait for?": [
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
    "3 · Queues: what waits, and where?": [
        Panel("Requests by phase", "none", sums("halfmoon_requests", "phase"), stacked=True),
        Panel(
            "Prefill: tokens that wait", "none", sums("halfmoon_prefill_queued_tokens", "worker")
        ),
        Panel(
            "Prefill: waits by stage, mean", "s", means("halfmoon_prefill_stage_seconds", "stage")
        ),
        Panel("Decode: requests", "none", sums("halfmoon_decode_requests", "state")),
        Panel("Decode: requests in a step", "none", quantiles("halfmoon_decode_batch_requests")),
        Panel("Decode: a step", "s", quantiles("halfmoon_decode_step_seconds")),
        Panel("Pages", "none", sums("halfmoon_pages", "job", "state"), stacked=True),
        Panel("Pages in use", "percentunit", highest("halfmoon_kv_cache_usage_ratio", "role")),
        Panel("Prefill: tokens", "short", rates("halfmoon_prefill_tokens_total", "source")),
    ],
    "4 · Pool: are prefixes found?": [
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
            "Cached prefixes, by the replica they were read from",
            "short",
            rates("halfmoon_prefill_cached_reads_total", "replica"),
        ),
        Panel(
            "Full",
            "percentunit",
            {
                "{{tier}} {{worker}}": (
                    f"{chosen('halfmoon_kvstore_used_bytes')}"
                    f" / ({chosen('halfmoon_kvstore_capacity_bytes')} > 0)"
                )
            },
        ),
        Panel("Bytes held", "bytes", sums("halfmoon_kvstore_used_bytes", "tier")),
        Panel("Blocks by state", "none", sums("halfmoon_kvstore_blocks", "tier", "state")),
        Panel("Blocks moved", "short", rates("halfmoon_kvstore_moved_blocks_total", "move")),
        Panel(
            "Blocks read, pinned, coming back",
            "none",
            {
                "leased": f"sum({chosen('halfmoon_kvstore_leased_blocks')})",
                "pinned, {{kind}}": (f"sum by (kind) ({chosen('halfmoon_kvstore_pinned_blocks')})"),
                "promoting": f"sum({chosen('halfmoon_kvstore_promoting_blocks')})",
            },
        ),
        Panel(
            "By tenant with a quota: blocks",
            "none",
            sums("halfmoon_kvstore_tenant_blocks", "tenant"),
        ),
        Panel("KV events: lag", "s", quantiles("halfmoon_kv_event_lag_seconds")),
        Panel(
            "KV events: messages behind", "none", highest("halfmoon_kv_events_behind", "kvstore")
        ),
        Panel(
            "KV events: published, snapshots",
            "short",
            {
                "published": total("halfmoon_kvstore_event_batches_total"),
                "snapshots": total("halfmoon_kv_snapshots_total"),
            },
        ),
    ],
    "5 · Workers: which one is it?": [
        Panel("Workers", "none", highest("halfmoon_workers", "role")),
        Panel(
            "Lateness of the event loop, p99",
            "s",
            quantiles("halfmoon_event_loop_lag_seconds", "worker", q=(0.99,)),
        ),
        Panel("Age of the lease", "s", highest("halfmoon_membership_lease_age_seconds", "worker")),
        Panel(
            "Decode: a step, p90",
            "s",
            quantiles("halfmoon_decode_step_seconds", "worker", q=(0.9,)),
        ),
        Panel("Pages used", "none", {"{{worker}}": f"sum by (worker) ({_USED_PAGES})"}),
        Panel(
            "Bytes moved",
            "Bps",
            rates("halfmoon_transfer_bytes_total", "worker", "op"),
            about="Counted by the process that moves them.",
        ),
        Panel("Bytes moved, by path", "Bps", rates("halfmoon_transfer_bytes_total", "path", "op")),
        Panel(
            "Transfers under way",
            "none",
            sums("halfmoon_transfers_live", "worker")
            | {
                "connections {{worker}}": (
                    f"sum by (worker) ({chosen('halfmoon_transfer_connections')})"
                )
            },
        ),
        Panel("Processors", "none", {"{{worker}}": rate("process_cpu_seconds_total")}),
        Panel("Memory", "bytes", {"{{worker}}": chosen("process_resident_memory_bytes")}),
    ],
    "6 · Faults: what broke?": [
        Panel(
            "Requests placed again, and failed",
            "reqps",
            {
                "placed again": total("halfmoon_request_retries_total"),
                "failed": total("halfmoon_requests_failed_total"),
            },
        ),
        Panel(
            "Prefill: ended, by result",
            "reqps",
            rates("halfmoon_prefill_requests_ended_total", "worker", "result"),
        ),
        Panel(
            "Decode: given up, by reason",
            "reqps",
            rates("halfmoon_decode_failures_total", "worker", "reason"),
        ),
        Panel(
            "Transfers that failed, slices tried again, bytes that came damaged",
            "short",
            {
                "failed": total("halfmoon_transfers_total", 'result="failed"'),
                "tried again": total("halfmoon_transfer_retries_total"),
                "damaged": total("halfmoon_transfer_corrupted_total"),
            },
        ),
        Panel(
            "Kvstores: damage, disks, left out",
            "short",
            {
                "damaged blocks": total("halfmoon_kvstore_damaged_blocks_total"),
                "failed writes": total("halfmoon_kvstore_disk_write_failures_total"),
                "disks off": f"sum({chosen('halfmoon_kvstore_disk_off')})",
                "kvstores left out": f"sum({chosen('halfmoon_prefill_kvstores_paused')})",
            },
        ),
        Panel(
            "Messages dropped, and failed",
            "short",
            rates("halfmoon_dropped_messages_total", "reason")
            | {
                "failed: {{message_type}}": (
                    f"sum by (message_type) ({rate('halfmoon_failed_messages_total')})"
                )
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return all of it, as Grafana reads it."""
    panels: list[dict[str, Any]] = [_guide()]
    y = _GUIDE_HEIGHT
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
        "templating": {"list": [_variable(each) for each in VARIABLES]},
        "panels": panels,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.label,
        "datasource": _DATASOURCE,
        "query": {"query": variable.query, "refId": f"values of {variable.name}"},
        "multi": True,
        "includeAll": True,
        # Series without the label count too, as those of a Prometheus that sets no such label.
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,  # by the alphabet
        "hide": 0,
        "regex": "",
        "options": [],
        "skipUrlSync": False,
    }


def _guide() -> dict[str, Any]:
    return {
        "id": 1,
        "type": "text",
        "title": "",
        "gridPos": {"x": 0, "y": 0, "w": 24, "h": _GUIDE_HEIGHT},
        "options": {"mode": "markdown", "content": _GUIDE},
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
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(written())
