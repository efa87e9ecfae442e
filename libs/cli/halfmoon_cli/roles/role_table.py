"""Render the roles of workers as text, and what the conductor does next. No I/O."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halfmoon_cli.common.printable_text import printable
from halfmoon_cli.roles.role_responses import RoleRow, RolesAnswer
from halfmoon_cli.status.text_charts import format_duration

_COLUMNS = ("worker", "role", "can be", "pinned", "load", "changing")


def render_roles(answer: RolesAnswer) -> Group:
    """Render a row for each worker, the loads of both sides, and the next change."""
    return Group(*_parts(answer))


def _parts(answer: RolesAnswer) -> Iterator[RenderableType]:
    if not answer.workers:
        yield Text("no prefill or decode worker", "yellow")
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column == "load" else "left", no_wrap=True)
    for row in answer.workers:
        table.add_row(*_cells(row))
    yield table
    yield Text()
    pools = " · ".join(
        f"{side}: load {pool.load:.2f}, workers: {pool.n_workers}"
        for side, pool in answer.pools.items()
    )
    yield Text(printable(pools))
    yield Text(printable(_next(answer)))


def _cells(row: RoleRow) -> tuple[RenderableType, ...]:
    return (
        Text(printable(row.worker_id)),
        Text(printable(row.role)) if row.role else Text("away", "yellow"),
        Text(printable(", ".join(row.roles)) or "–"),
        Text(printable(row.pinned), "bold") if row.pinned else "–",
        "–" if row.load is None else f"{row.load:.2f}",
        Text(printable(describe_change(row)), "yellow"),
    )


def describe_change(row: RoleRow) -> str:
    """Say how far a worker's change is; empty without one."""
    if not row.changing_to:
        return "draining" if row.draining else ""
    if row.has_begun:
        return f"to {row.changing_to}: " + ("it drains" if row.role else "it starts again")
    if row.n_asked > 1:
        return f"to {row.changing_to}: asked {row.n_asked} times, its log says why it refuses"
    return f"to {row.changing_to}: asked"


def _next(answer: RolesAnswer) -> str:
    step = answer.next
    if step is not None:
        due = f"in {format_duration(step.due_s)}" if step.due_s else "now"
        return f"next: {step.worker_id} to {step.to} {due}, if the loads stay: {answer.reason}"
    rest = f" (none for {format_duration(answer.rest_s)}: one was made)" if answer.rest_s else ""
    return f"next: no change{rest}: {answer.reason}"
