"""`halfmoon status`: the cluster as its conductor sees it."""

import httpx
from rich.console import Console
from rich.table import Table


def show_status(url: str, console: Console) -> None:
    """Print one row per worker.

    Raises:
        httpx.HTTPError: the conductor does not answer, or not as one.
    """
    answer = httpx.get(f"{url}/debug/cluster", timeout=5.0)
    answer.raise_for_status()
    cluster = answer.json()
    requests = ", ".join(f"{n} {phase}" for phase, n in cluster["requests"].items() if n)
    title = f"{cluster['model'] or 'no model yet'} · requests: {requests or 'none'}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("worker", "role", "generation", "blocks", "state"):
        table.add_column(column)
    for worker in cluster["workers"]:
        state = worker["refused"] or ("draining" if worker["draining"] else "live")
        table.add_row(
            worker["worker_id"],
            worker["role"],
            str(worker["generation"]),
            str(worker["n_blocks"]),
            state,
        )
    console.print(table)
