"""Render a cluster as text: workers, latencies, hot prefixes, last decisions. No I/O."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halfmoon_cli.common.printable_text import printable
from halfmoon_cli.status.debug_responses import (
    ClusterStatus,
    StatusCluster,
    StatusDecision,
    StatusDecisions,
    StatusLatencies,
    StatusWorker,
)
from halfmoon_cli.status.latency_trend import SHOWN_S, LatencyTrend, latency_trend
from halfmoon_cli.status.text_charts import bar, format_bytes, format_duration, sparkline

_HOT_SHOWN = 5
#: A worker that was silent for longer is marked.
_SILENT_S = 5.0


def render_status(status: ClusterStatus, *, n_decisions: int) -> Group:
    """Render all parts, one below the other."""
    return Group(
        _head(status.cluster),
        *_workers(status.cluster),
        Text(),
        _latencies(status.latencies),
        *_hot_prefixes(status.cluster),
        *_decisions(status.decisions, n_decisions),
    )


def _head(cluster: StatusCluster) -> Text:
    about = cluster.conductor
    facts = [about.conductor_id + (f", metadata {about.metadata}" if about.metadata else "")]
    if cluster.layout is not None:
        facts.append(
            f"blocks of {cluster.layout.block_size} tokens, {format_bytes(cluster.block_bytes)}"
        )
    for name in ("placement", "admission"):
        if name in cluster.scheduling:
            facts.append(f"{name} {cluster.scheduling[name]}")
    busy = ", ".join(f"{n:,} {phase}" for phase, n in cluster.requests.items() if n) or "none"
    lines = [f"requests: {busy}"]
    if loads := ", ".join(f"{pool} {load:.2f}" for pool, load in cluster.pools.items() if load):
        lines[0] += f" · load over its limit: {loads}"
    reuse = cluster.reuse
    if reuse.n_tokens:
        lines.append(
            f"reused: {reuse.n_cached / reuse.n_tokens:.1%} of {reuse.n_tokens:,} tokens in"
            f" {reuse.n_prompts:,} prompts, {reuse.n_transferred:,} of them from another kvstore"
        )
    if computes := _computes_with(cluster):
        lines.append(f"computes with: {computes}")
    text = Text(printable(cluster.model or "no model yet"), "bold")
    text.append(printable("".join(f" · {fact}" for fact in facts)), "dim not bold")
    return text.append(printable("".join(f"\n{line}" for line in lines)), "not bold")


def _computes_with(cluster: StatusCluster) -> str:
    """Say what computes the model, and on which workers where they differ."""
    by_engine: dict[str, list[str]] = {}
    for worker in cluster.workers:
        if worker.computes_with:
            by_engine.setdefault(worker.computes_with, []).append(worker.worker_id)
    if len(by_engine) < 2:
        return "".join(by_engine)
    return "; ".join(f"{what} ({', '.join(ids)})" for what, ids in by_engine.items())


def _workers(cluster: StatusCluster) -> Iterator[RenderableType]:
    """Yield a table for each role, then the workers that are not used."""
    used = [worker for worker in cluster.workers if not worker.refused]
    for role, (row, columns) in _ROLES.items():
        members = sorted((w for w in used if w.role == role), key=lambda w: w.worker_id)
        table = _table(f"{role} ({len(members)})", *columns, "")
        for worker in members:
            table.add_row(_name(worker), *row(worker), _heard(worker))
        yield Text()
        yield table if members else Text(f"no {role} worker", "yellow")
    for worker in cluster.workers:
        if worker.refused:
            yield _said(f"{worker.worker_id} is refused: {worker.refused}", "red")
    for each in cluster.unreachable:
        since = format_duration(each.for_s)
        text = f"{each.worker_id} is unreachable at {each.address} since {since}: {each.reason}"
        yield _said(f"{text}; {each.advice}" if each.advice else text, "red")
    for gone in cluster.gone:
        text = f"{gone.worker_id} went {format_duration(gone.s_ago)} ago: {gone.reason}"
        yield _said(text, "yellow")


def _prefill(worker: StatusWorker) -> tuple[RenderableType, ...]:
    load = worker.load
    return (
        f"{load.n_requests:,}",
        format_duration(load.queue_s),
        f"{load.queued_tokens:,}",
        bar(load.n_pages - load.free_pages, load.n_pages),
        printable(worker.home or "–"),
    )


def _decode(worker: StatusWorker) -> tuple[RenderableType, ...]:
    load = worker.load
    return (
        f"{load.n_running:,}",
        f"{load.n_reserved:,}",
        f"{load.context_tokens:,}",
        format_duration(load.step_s),
        format_duration(load.tbt_s),
        bar(load.n_pages - load.free_pages, load.n_pages),
    )


def _kvstore(worker: StatusWorker) -> tuple[RenderableType, ...]:
    load = worker.load
    memory, disk, lookups = load.memory, load.disk, load.lookups
    n_asked = lookups.n_found + lookups.missing
    # A full cache is a good one.
    return (
        f"{memory.n_stored:,}",
        bar(memory.n_stored, memory.n_blocks, fuller_is_worse=False),
        bar(disk.n_stored, disk.n_blocks, fuller_is_worse=False),
        f"{lookups.n_found / n_asked:.0%} of {n_asked:,}" if n_asked else "–",
        f"{load.n_readers:,}",
    )


_Row = Callable[[StatusWorker], tuple[RenderableType, ...]]
#: Cells of a worker's row and the headings of the columns, by role.
_ROLES: dict[str, tuple[_Row, tuple[str, ...]]] = {
    "prefill": (_prefill, ("requests", "queue", "tokens", "pages taken", "kvstore")),
    "decode": (_decode, ("running", "landing", "context", "step", "next TBT", "pages taken")),
    "kvstore": (_kvstore, ("blocks", "memory", "disk", "found", "readers")),
}


def _name(worker: StatusWorker) -> Text:
    text = Text(printable(worker.worker_id))
    return text.append(" draining", "yellow") if worker.draining else text


def _heard(worker: StatusWorker) -> Text:
    if worker.heard_s_ago is None:
        return Text("not heard yet", "yellow")
    if worker.heard_s_ago > _SILENT_S:
        return Text(f"silent for {format_duration(worker.heard_s_ago)}", "yellow")
    return Text("")


def _latencies(latencies: StatusLatencies) -> RenderableType:
    table = _table(f"last {SHOWN_S} s", "p50", "p90", "limit", "", right=3)
    rows: tuple[tuple[str, LatencyTrend, float | None], ...] = (
        ("TTFT", latency_trend(latencies, "ttft"), latencies.ttft_slo_s),
        ("TBT", latency_trend(latencies, "tbt"), latencies.tbt_slo_s),
    )
    for name, found, slo_s in rows:
        numbers = (
            (format_duration(found.p50_s), format_duration(found.p90_s)) if found.n else ("–", "–")
        )
        limit = "–" if slo_s is None else format_duration(slo_s)
        table.add_row(name, *numbers, limit, Text(sparkline(found.p90s_s), "cyan"))
    return table


def _hot_prefixes(cluster: StatusCluster) -> Iterator[RenderableType]:
    if not cluster.hot_prefixes:
        return
    yield Text()
    table = _table("hot prefix", "tokens", "uses", "held by", right=2)
    for hot in cluster.hot_prefixes[:_HOT_SHOWN]:
        holders = ", ".join(hot.holders) or "no holder"
        table.add_row(
            printable(hot.prefix[:12]), f"{hot.n_tokens:,}", f"{hot.uses:.1f}", printable(holders)
        )
    yield table


def _decisions(decisions: StatusDecisions, n_shown: int) -> Iterator[RenderableType]:
    shown = decisions.decisions[-n_shown:][::-1] if n_shown else []
    if shown:
        yield Text()
        table = _table("last decisions", "tokens", "cached", "TTFT", "predicted", "", right=4)
        for decision in shown:
            table.add_row(*_decided(decision, decisions.now_s))
        yield table
    if decisions.refusals and any(decisions.refusals.values()):
        reasons = ", ".join(f"{n:,} {why}" for why, n in decisions.refusals.items() if n)
        yield _said(f"refused since the start, for want of: {reasons}", "yellow")


def _decided(decision: StatusDecision, now_s: float) -> Sequence[RenderableType]:
    course = decision.course
    placed = decision.outcome == "placed"
    style = "" if placed else "yellow"
    predicted = format_duration(decision.placement.chosen.ttft_s) if placed else "–"
    why = decision.why or decision.reason or decision.outcome
    return (
        Text(f"{format_duration(max(0.0, now_s - decision.at_s))} ago", "dim"),
        f"{course.n_tokens:,}" if course else "–",
        f"{course.n_cached:,}" if course else "–",
        format_duration(course.ttft_s) if course and course.ttft_s is not None else "–",
        predicted,
        Text(printable(why if placed else f"{decision.outcome}: {why}"), style),
    )


def _table(first: str, *columns: str, right: int | None = None) -> Table:
    """Columns of numbers stand on the right, the first one and what follows them on the left."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    n_right = len(columns) - 1 if right is None else right
    table.add_column(first, no_wrap=True)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number < n_right else "left")
    return table


def _said(text: str, style: str) -> Text:
    return Text(printable(text), style)
