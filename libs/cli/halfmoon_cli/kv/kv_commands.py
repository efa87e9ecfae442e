"""Define `halfmoon kv`: show the KV pool, store and read bytes, drain a node.

The commands; what they do is in `nodes` and `objects`, imported when one of them runs.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_cli.common.metadata_address import DEFAULT_METADATA, Metadata, open_metadata
from halfmoon_metadata.whole_file import replacing_file

if TYPE_CHECKING:
    from halfmoon_cli.kv.kvstore_nodes import KvstoreNodes
    from halfmoon_metadata import MetadataStore

_MIB = 1024 * 1024

app = typer.Typer(no_args_is_help=True, help="Look into the KV pool, put bytes in, get them out.")
#: Results go to standard output, all else to standard error: bytes may be piped.
console = Console()
errors = Console(stderr=True)

Key = Annotated[str, typer.Argument(help="The object's key")]
Bind = Annotated[str, typer.Option(help="Address at which kvstores could reach this machine")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs")]


@app.callback()
def kv() -> None:
    """Look into the KV pool, put bytes in, get them out."""


@app.command()
def ls(
    node: Annotated[str, typer.Argument(help="A node, for its blocks; empty: all nodes")] = "",
    metadata: Metadata = DEFAULT_METADATA,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Blocks to list")] = 100,
    after: Annotated[str, typer.Option(help="List those after this hash")] = "",
    json: Json = False,
) -> None:
    """List the nodes of the pool and how full they are, or the blocks of one."""
    with _nodes(metadata) as nodes:
        if node:
            query = {"limit": limit, **({"after": after} if after else {})}
            page = nodes.get(nodes.find_node(node), "/blocks", **query)
            if json:
                _print_json(page)
                return
            for block in page["hashes"]:
                console.print(block, highlight=False)
            errors.print(f"{len(page['hashes'])} of {page['n_blocks']} blocks", highlight=False)
            return
        rows = [nodes.get(info, "/segments") for info in nodes.list_nodes()]
        if json:
            _print_json(rows)
            return
        table = Table(box=None, pad_edge=False)
        for column in ("node", "block", "blocks", "memory", "read", "pinned", "disk", "state"):
            table.add_column(column)
        for row in rows:
            memory, disk = row["memory"], row["disk"]
            table.add_row(
                row["worker_id"],
                decimal(row["block_bytes"]) if row["block_bytes"] else "-",
                str(row["n_blocks"]),
                f"{memory.get('used', 0)} of {memory['n_slots']}",
                str(memory.get("leased", 0)),
                str(row["pins"]["soft"] + row["pins"]["hard"]),
                f"{sum(d['used'] for d in disk)} of {sum(d['n_slots'] for d in disk)}"
                if disk
                else "-",
                _state(row),
            )
        console.print(table)


def _state(row: dict[str, Any]) -> str:
    """Name what keeps a node from its full service, if anything does."""
    if row["draining"]:
        return "leaving"
    if row["disk_off"]:
        return "disk off"
    if missing := row.get("disk_missing_bytes", 0):  # nodes of older builds do not tell
        return f"disk lacks {missing // _MIB} MiB"
    return "well"


@app.command()
def stat(
    what: Annotated[str, typer.Argument(help="An object's key; with --block, a block's hash")],
    metadata: Metadata = DEFAULT_METADATA,
    block: Annotated[bool, typer.Option("--block", help="It is the hash of a block")] = False,
    bind: Bind = "127.0.0.1",
    json: Json = False,
) -> None:
    """Show the node and size of an object, or the nodes and readers of a block."""
    if not block:
        import asyncio

        from halfmoon_cli.kv.object_client import open_object_client

        async def find(store: "MetadataStore") -> Any:
            async with open_object_client(
                store, cluster_key=read_cluster_key(), bind=bind
            ) as objects:
                return msgspec.to_builtins(await objects.stat(what))

        with _explained(), open_metadata(metadata) as store:
            found = asyncio.run(find(store))
        if json:
            _print_json(found)
            return
        console.print(
            f"{escape(what)}: {decimal(found['n_bytes'])} at {escape(found['node'])}, in "
            f"{found['n_blocks']} blocks of {decimal(found['block_bytes'])}",
            highlight=False,
        )
        return
    with _nodes(metadata) as nodes:
        looks = [nodes.get_optional(info, f"/blocks/{what}") for info in nodes.list_nodes()]
    there = [look for look in looks if look is not None]
    if json:
        _print_json(there)
    elif not there:
        _give_up(f"no kvstore has block {what}")
    for look in () if json else there:
        age = "-" if look["age_s"] is None else f"{look['age_s']:.0f} s"
        pin = "none" if look["pin"] is None else look["pin"]["kind"]
        console.print(
            f"{escape(look['worker_id'])}: {look['tier']}, {decimal(look['bytes'])}, depth "
            f"{look['depth']}, here for {age}, {look['leases']} readers, pin {pin}",
            highlight=False,
        )


@app.command()
def put(
    key: Key,
    file: Annotated[str, typer.Argument(help="What to store; - is standard input")],
    metadata: Metadata = DEFAULT_METADATA,
    node: Annotated[str, typer.Option(help="Where; empty: the key decides")] = "",
    block_size_kib: Annotated[
        int,
        typer.Option(
            min=0,
            max=65536,
            help="Size of blocks for nodes that have none yet, where no model is served; they are "
            "for bytes only then. Where one is, its blocks are taken",
        ),
    ] = 0,
    bind: Bind = "127.0.0.1",
    json: Json = False,
) -> None:
    """Store bytes under a key. The same bytes again are fine, others are refused."""
    import asyncio

    from halfmoon_cli.kv.object_client import open_object_client

    async def store_it(store: "MetadataStore", source: BinaryIO, bar: Progress) -> Any:
        task = bar.add_task(key, total=_size(source))
        async with open_object_client(
            store, cluster_key=read_cluster_key(), bind=bind, block_kib=block_size_kib
        ) as objects:
            return await objects.put(
                key, source, node=node, progress=lambda n: bar.advance(task, n)
            )

    with _explained(), open_metadata(metadata) as store, _source(file) as source, _bar(json) as bar:
        found = asyncio.run(store_it(store, source, bar))
    if json:
        _print_json(msgspec.to_builtins(found))
        return
    errors.print(
        f"{escape(key)}: {decimal(found.n_bytes)} at {escape(found.node)}, in {found.n_blocks} "
        f"blocks of {decimal(found.block_bytes)}",
        highlight=False,
    )


@app.command()
def get(
    key: Key,
    file: Annotated[str, typer.Argument(help="Where to write it; - is standard output")],
    metadata: Metadata = DEFAULT_METADATA,
    bind: Bind = "127.0.0.1",
    json: Json = False,
) -> None:
    """Get the bytes of a key. A file is there whole, and verified, or not at all."""
    import asyncio

    from halfmoon_cli.kv.object_client import open_object_client

    if json and file == "-":
        _give_up("--json and - would both write to standard output")

    async def fetch(store: "MetadataStore", sink: BinaryIO, bar: Progress) -> Any:
        async with open_object_client(store, cluster_key=read_cluster_key(), bind=bind) as objects:
            task = bar.add_task(key, total=(await objects.stat(key)).n_bytes)
            return await objects.get(key, sink, progress=lambda n: bar.advance(task, n))

    with _explained(), open_metadata(metadata) as store, _sink(file) as sink, _bar(json) as bar:
        found = asyncio.run(fetch(store, sink, bar))
    if json:
        _print_json(msgspec.to_builtins(found))
        return
    errors.print(
        f"{escape(key)}: {decimal(found.n_bytes)} from {escape(found.node)}, checksums right",
        highlight=False,
    )


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="The node that is to leave")],
    metadata: Metadata = DEFAULT_METADATA,
    deadline_s: Annotated[
        float, typer.Option(min=0.001, help="It leaves after so long with what it still has")
    ] = 600.0,
    wait: Annotated[bool, typer.Option(help="Stay until it has left")] = True,
    json: Json = False,
) -> None:
    """Have a node move what only it has to others, and leave. Status 1: it could not move all."""
    from halfmoon_cli.kv.kvstore_nodes import DRAIN_POLL_S, KvstoreNodeError

    with _nodes(metadata) as nodes:
        info = nodes.find_node(node)
        seen = nodes.post(info, "/drain", {"deadline_s": deadline_s})
        if wait:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(*columns, console=errors, disable=json) as bar:
                task = bar.add_task(f"{node}: blocks moved", total=None)
                with contextlib.suppress(KvstoreNodeError):  # it has left
                    # At once: the node then stays until its end was read, however busy we are.
                    while (seen := nodes.get(info, "/drain"))["state"] == "moving":
                        bar.update(task, total=seen["n_blocks"] or None, completed=seen["n_moved"])
                        time.sleep(DRAIN_POLL_S)
    if json:
        _print_json(seen)
    elif not wait:
        errors.print(f"{escape(node)} is leaving", highlight=False)
    else:
        told = {"done": "all it had is elsewhere", "moving": "it ended before it said how far"}
        errors.print(
            f"{escape(node)}: {seen['n_moved']} blocks moved "
            f"({decimal(seen['bytes_moved'])}), {seen['n_left']} left: "
            f"{escape(seen['reason'] or told[seen['state']])}",
            highlight=False,
        )
    if wait and seen["state"] != "done":
        raise typer.Exit(1)


# -- inside ----------------------------------------------------------------------------------


@contextmanager
def _nodes(metadata: str) -> Iterator["KvstoreNodes"]:
    from halfmoon_cli.kv.kvstore_nodes import KvstoreNodes

    with (
        _explained(),
        open_metadata(metadata) as store,
        contextlib.closing(KvstoreNodes(store)) as nodes,
    ):
        yield nodes


@contextmanager
def _source(file: str) -> Iterator[BinaryIO]:
    """Open the file or standard input as a source that can be read twice."""
    if file != "-":
        with Path(file).open("rb") as source:
            yield source
        return
    with tempfile.TemporaryFile() as copy:
        while part := sys.stdin.buffer.read(1 << 20):
            copy.write(part)
        yield copy


@contextmanager
def _sink(file: str) -> Iterator[BinaryIO]:
    """Open the file or standard output to write to; a file gets its name once it is whole."""
    if file == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with replacing_file(Path(file)) as draft:
        yield draft


def _size(source: BinaryIO) -> int:
    return source.seek(0, os.SEEK_END)


def _bar(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=quiet,
    )


def _print_json(data: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(data)).decode())


@contextmanager
def _explained() -> Iterator[None]:
    """Print errors of nodes, files and transfers in one line, and exit with 2."""
    from halfmoon_cli.kv.kvstore_nodes import KvstoreNodeError
    from halfmoon_cli.kv.object_client import ObjectError
    from halfmoon_metadata import MetadataError
    from halfmoon_runtime.kvstore_clients import KvstoreUnavailable
    from halfmoon_transfer import TransferError

    try:
        yield
    except (
        KvstoreNodeError,
        ObjectError,
        KvstoreUnavailable,
        TransferError,
        MetadataError,
        OSError,
        ValueError,
    ) as error:
        _give_up(str(error))
    except KeyboardInterrupt:
        _give_up("interrupted")


def _give_up(message: str) -> None:
    errors.print(f"[red]halfmoon:[/red] {escape(message)}", highlight=False)
    raise typer.Exit(2)
