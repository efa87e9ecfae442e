"""A kvstore's HTTP for operators, at nodes that run as processes."""

import time
from pathlib import Path
from typing import Any

import httpx

from halfmoon_kvstore.admin_api import AdminApi
from halfmoon_kvstore.drain.drain_controller import DrainController
from halfmoon_protocol.ids import BlockHash
from halfmoon_runtime.observability.operator_http import OperatorHttp
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_testing.block_client import SMALL_LAYOUT, prompt_blocks

MIB = 1 << 20


async def pin(web: httpx.AsyncClient, block: BlockHash, kind: str, **more: Any) -> httpx.Response:
    return await web.post("/pin", json={"hash": block.hex(), "kind": kind, **more})


async def test_a_block_tells_its_tier_age_readers_and_pin(nodes: Any, tmp_path: Path) -> None:
    nodes.start(
        "a", capacity_mib=1, metrics_port=0, disk_path=tmp_path / "a", disk_mib=8,
        promotion_wait_s=60,
    )  # fmt: skip
    prompts = [prompt_blocks(i, 32) for i in range(24)]
    async with nodes.client("a") as client, nodes.http("a") as web:
        for each in prompts:
            await client.put(each)
        found = (await web.get(f"/blocks/{prompts[-1][3].hex()}")).json()
        assert found["parent"] == prompts[-1][2].hex() and found["depth"] == 3
        assert (found["tier"], found["leases"], found["pin"]) == ("memory", 0, None)
        assert found["age_s"] >= 0 and found["bytes"] == SMALL_LAYOUT.block_bytes
        assert (found["worker_id"], found["generation"]) == ("a", 1)
        old = (await web.get(f"/blocks/{prompts[0][3].hex()}")).json()
        assert (old["tier"], old["on_disk"], old["age_s"]) == ("disk", True, None)

        first = (await web.get("/blocks?limit=500")).json()
        rest = (await web.get(f"/blocks?limit=500&after={first['hashes'][-1]}")).json()
        assert first["hashes"] + rest["hashes"] == sorted(b.hex() for each in prompts for b in each)
        assert first["n_blocks"] == 24 * 32

        segments = (await web.get("/segments")).json()
        memory, [disk] = segments["memory"], segments["disk"]
        assert (
            memory["used"] + memory["free"] == memory["n_slots"] == MIB // SMALL_LAYOUT.block_bytes
        )
        assert memory["lost_bytes"] == 0 and segments["n_blocks"] == 24 * 32
        assert disk["used"] >= 24 * 32 - memory["stored"]
        assert disk["used"] + disk["free"] == disk["n_slots"]
        assert disk["lost_bytes"] == disk["bytes"] - disk["n_slots"] * SMALL_LAYOUT.block_bytes
        assert 0 < disk["fragmentation"] < 0.1


async def test_pinned_blocks_stay_until_their_time_and_hard_pins_are_limited(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1, metrics_port=0, hard_pin_share=0.1)  # 25 blocks
    kept, other = prompt_blocks(1, 20), prompt_blocks(2, 20)
    async with nodes.client("a") as client, nodes.http("a") as web:
        await client.put(kept)
        await client.put(other)
        pinned = (await pin(web, kept[-1], "hard", ttl_s=600)).json()
        assert pinned["pin"]["kind"] == "hard" and 590 < pinned["pin"]["remaining_s"] <= 600
        held = (await web.get(f"/blocks/{kept[0].hex()}")).json()
        assert held["held"] and held["pin"] is None
        refused = await pin(web, other[-1], "hard")
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "pin_limit"
        assert "20 of 25" in refused.json()["error"]["message"]
        assert (await pin(web, other[3], "soft", until=time.time() + 600)).status_code == 200
        for i in range(3, 23):
            await client.put(prompt_blocks(i, 32))
        assert await client.get(kept) == kept
        assert await client.get(other) == other[:4]
        assert (await web.get("/segments")).json()["pins"] == {
            "soft": 1, "hard": 1, "held": 20, "max_held": 25
        }  # fmt: skip
        assert (
            'halfmoon_kvstore_pinned_blocks{kind="held"} 20.0' in (await web.get("/metrics")).text
        )
        assert (await pin(web, kept[-1], "none")).json()["pin"] is None
        for i in range(23, 43):
            await client.put(prompt_blocks(i, 32))
        assert await client.get(kept) == []


async def test_a_node_is_well_before_its_first_put_and_names_wrong_questions(nodes: Any) -> None:
    nodes.start("a", capacity_mib=1, metrics_port=0)
    [block] = prompt_blocks(1, 1)
    async with nodes.client("a") as client, nodes.http("a") as web:
        assert (await web.get("/health")).status_code == 200
        assert (await web.get("/ready")).status_code == 200
        assert "halfmoon_dropped_messages_total" in (await web.get("/metrics")).text
        assert (await web.get("/blocks")).json() == {"n_blocks": 0, "hashes": []}
        assert (await web.get("/segments")).json()["memory"]["bytes"] == MIB
        missing = await web.get("/blocks/ab")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "block_not_found"
        assert "ab is not at a" in missing.json()["error"]["message"]
        await client.put([block])
        for answer, status, word in (
            (await web.get("/blocks/xyz"), 400, "hexadecimal"),
            (await web.get("/blocks?limit=0"), 400, "limit"),
            (await web.get("/blocks?after=x"), 400, "after"),
            (await web.post("/pin", json={"hash": block.hex()}), 400, "kind"),
            (await pin(web, block, "firm"), 400, "kind"),
            (await pin(web, block, "soft", ttl_s=-1), 400, "ttl_s"),
            (await pin(web, block, "soft", ttl_s=1, until=2), 400, "not both"),
            (await pin(web, block, "soft", until=2), 400, "ago"),
            (await pin(web, block, "soft", for_s=2), 400, "for_s"),
            (await pin(web, BlockHash(b"gone"), "soft"), 404, "not at a"),
            (await web.get("/pin"), 405, "POST"),
        ):
            assert answer.status_code == status, answer.text
            assert word in answer.json()["error"]["message"]


KEY = "sixteen characters, or more"


def routes() -> list[tuple[str, str]]:
    """All that a node adds for operators."""
    unused: Any = None
    http = OperatorHttp(unused, unused)
    AdminApi(unused, unused).register(http)
    DrainController(unused, unused, unused, unused).register(http)
    return [(route.method, route.path) for route in http.routes]


async def test_every_route_of_a_node_needs_its_clusters_token(nodes: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", KEY)
    nodes.start("a", capacity_mib=1, metrics_port=0)
    asked = {
        (method, path.replace("{hash}", "ab")): (
            {"json": {"hash": "ab", "kind": "hard"}} if method == "POST" else {}
        )
        for method, path in routes()
    }
    assert {("POST", "/pin"), ("POST", "/drain"), ("GET", "/segments")} <= asked.keys()
    async with nodes.http("a") as web:
        for (method, path), body in asked.items():
            for shown in (None, "Bearer " + "0" * 64, f"Bearer {operator_token(KEY + '!')}"):
                headers = {} if shown is None else {"authorization": shown}
                answer = await web.request(method, path, headers=headers, **body)
                assert answer.status_code == 401, f"{method} {path} with {shown}"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/metrics", "/health"):
            assert (await web.get(path)).status_code == 200
        web.headers["authorization"] = f"Bearer {operator_token(KEY)}"
        assert (await web.get("/drain")).json()["state"] == "idle"
        for (method, path), body in asked.items():
            if path != "/drain":
                answer = await web.request(method, path, **body)
                assert answer.status_code in (200, 404), f"{method} {path}"
