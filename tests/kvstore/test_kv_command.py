"""`halfmoon kv` at nodes that run as processes, as whoever types it sees it."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from halfmoon_metadata import open_store
from halfmoon_protocol.messages import DropBlocks
from halfmoon_protocol.objects import object_hashes
from halfmoon_runtime.membership import Membership
from halfmoon_testing.scheduling_inputs import LAYOUT, a_worker

RUNNER = CliRunner()


def kv(nodes: Any, *words: object, **more: Any) -> Result:
    line = ["kv", *map(str, words), "--metadata", nodes.metadata_url]
    return RUNNER.invoke(app, line, **more)


def put(nodes: Any, key: str, content: bytes, *words: object) -> Result:
    done = kv(nodes, "put", key, "-", "--block-size-kib", 4, *words, input=content)
    assert done.exit_code == 0, done.stderr
    return done


def got(nodes: Any, key: str) -> bytes:
    return kv(nodes, "get", key, "-").stdout_bytes


def told(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def some_bytes(n: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(n)


def test_bytes_of_any_length_come_back_as_they_were_put(nodes: Any, tmp_path: Path) -> None:
    nodes.start("a", capacity_mib=8, metrics_port=0)
    source, back = tmp_path / "source", tmp_path / "back"
    sizes = [0, 1, 4096 - 32, 4096 - 31, 3_000_000]
    for n in sizes:
        source.write_bytes(some_bytes(n, n))
        done = kv(nodes, "put", f"object/{n}", source, "--block-size-kib", 4)
        assert done.exit_code == 0 and "4.1 kB" in done.stderr
    for n in sizes:
        done = kv(nodes, "get", f"object/{n}", back)
        assert done.exit_code == 0 and "checksums right" in done.stderr
        assert back.read_bytes() == some_bytes(n, n)
    found = told(kv(nodes, "stat", "object/3000000", "--json"))
    assert found == {"node": "a", "n_bytes": 3_000_000, "n_blocks": 733, "block_bytes": 4096}

    assert kv(nodes, "put", "pipe", "-", input=b"from a pipe").exit_code == 0
    assert got(nodes, "pipe") == b"from a pipe"
    assert kv(nodes, "put", "pipe", "-", input=b"from a pipe").exit_code == 0  # again is fine
    other = kv(nodes, "put", "pipe", "-", input=b"something else")
    assert other.exit_code == 2 and "other bytes (11 of them) are at a" in other.stderr

    [row] = told(kv(nodes, "ls", "--json"))
    assert row["worker_id"] == "a" and row["n_blocks"] == 1 + 1 + 1 + 2 + 733 + 1
    assert "741" not in kv(nodes, "ls").stdout and "739" in kv(nodes, "ls").stdout
    page = kv(nodes, "ls", "a", "--limit", 700)
    assert len(page.stdout.split()) == 700 and "700 of 739" in page.stderr
    head = object_hashes("pipe", 1, 4096)[0].hex()
    [look] = told(kv(nodes, "stat", "--block", head, "--json"))
    assert look["tier"] == "memory" and look["leases"] == 0
    assert "a: memory, 4.1 kB, depth 0" in kv(nodes, "stat", "--block", head).stdout


def test_what_is_wrong_is_one_line_and_no_half_file_is_left(nodes: Any, tmp_path: Path) -> None:
    nodes.start("a", capacity_mib=1, metrics_port=0)
    target = tmp_path / "target"
    for words, told in (
        (("put", "k", tmp_path / "none"), "No such file"),
        (("put", "k", "-"), "a: it has no block size yet, give one"),
        (("put", "k", "-", "--node", "b"), "there is no kvstore"),
        (("put", "", "-"), "1 to 1024"),
        (("get", "k", target), "k: no kvstore has it"),
        (("stat", "k"), "k: no kvstore has it"),
        (("stat", "--block", "ab"), "no kvstore has block ab"),
        (("ls", "b"), "there is no kvstore b; there are: a"),
        (("drain", "b"), "there is no kvstore b"),
        (("get", "k", "-", "--json"), "standard output"),
    ):
        result = kv(nodes, *words, input=b"x")
        assert result.exit_code == 2 and told in " ".join(result.stderr.split()), result.output
    big = tmp_path / "big"
    big.write_bytes(some_bytes(2 << 20, 1))
    full = kv(nodes, "put", "big", big, "--block-size-kib", 64)
    # Its own beginning is evicted by nothing: what does not fit is refused.
    assert full.exit_code == 2 and "no room" in " ".join(full.stderr.split())
    lost = kv(nodes, "get", "big", target)
    assert lost.exit_code == 2 and "blocks are left" in " ".join(lost.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "a.log", "a.status.json", "big"
    ]  # fmt: skip


def test_a_drained_nodes_objects_are_found_at_the_others(nodes: Any, tmp_path: Path) -> None:
    for name in "abc":
        nodes.start(name, capacity_mib=4, metrics_port=0)
    contents = {f"object/{i}": some_bytes(50_000, i) for i in range(4)}
    for key, content in contents.items():
        assert told(put(nodes, key, content, "--json"))["n_bytes"] == 50_000
    homes = {key: told(kv(nodes, "stat", key, "--json"))["node"] for key in contents}
    left = sorted(set(homes.values()))[0]
    assert len(set(homes.values())) > 1, "keys lead to several nodes"
    done = kv(nodes, "drain", left)
    assert done.exit_code == 0 and "all it had is elsewhere" in done.stderr, done.stderr
    assert nodes.processes[left].wait(60)
    for key, content in contents.items():
        assert got(nodes, key) == content
    rest = sorted({*"abc"} - {left})
    assert [row["worker_id"] for row in told(kv(nodes, "ls", "--json"))] == rest
    # The last one has nobody to give it to.
    assert told(kv(nodes, "drain", rest[0], "--json"))["state"] == "done"
    assert nodes.processes[rest[0]].wait(60)
    alone = kv(nodes, "drain", rest[1], "--json")
    assert alone.exit_code == 1
    assert "no other kvstore" in json.loads(alone.stdout)["reason"]


def test_an_object_that_lost_its_end_says_so_and_is_whole_once_put_again(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1, metrics_port=0)
    content = some_bytes(5 * 4096, 1)
    put(nodes, "k", content)
    hashes = object_hashes("k", 6, 4096)

    async def drop() -> None:
        async with nodes.client("a") as client:
            await client.send(DropBlocks(hashes=tuple(hashes[:3:-1])))
            while len(await client.stored()) != 4:
                await asyncio.sleep(0.01)

    asyncio.run(drop())
    lost = kv(nodes, "get", "k", "-")
    assert lost.exit_code == 2 and "k: 4 of its 6 blocks are left" in lost.stderr
    assert kv(nodes, "put", "k", "-", input=content).exit_code == 0
    assert got(nodes, "k") == content


def test_an_object_whose_blocks_lie_at_two_nodes_is_read_from_both(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1, metrics_port=0)
    content = some_bytes(300 * 2048, 1)  # 151 blocks
    put(nodes, "k", content)
    nodes.start("b", capacity_mib=1, metrics_port=0)
    put(nodes, "other", content, "--node", "b")
    nodes.start("c", capacity_mib=1)
    drained = told(kv(nodes, "drain", "a", "--json"))
    assert drained["state"] == "done" and drained["n_moved"] == 151
    assert nodes.processes["a"].wait(60)
    assert got(nodes, "k") == content


def test_a_put_into_an_empty_node_keeps_it_for_the_model_that_is_served(nodes: Any) -> None:
    nodes.start("a", capacity_mib=8, metrics_port=0)
    served = msgspec.structs.replace(
        a_worker("prefill-0"), layout=msgspec.structs.replace(LAYOUT, head_dim=64)
    )
    store = open_store(nodes.metadata_url)
    try:
        asyncio.run(Membership(store, served, ttl_s=600.0).join())
    finally:
        store.close()
    refused = kv(nodes, "put", "k", "-", "--block-size-kib", 256, input=b"some bytes")
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "blocks of 16 KiB (model tiny)" in said and "prefill-0" in said
    assert "leave --block-size-kib out" in said
    assert nodes.info("a").layout is None and nodes.processes["a"].exit_code is None
    assert kv(nodes, "put", "k", "-", input=b"some bytes").exit_code == 0
    assert nodes.info("a").layout == served.layout
    assert got(nodes, "k") == b"some bytes"
