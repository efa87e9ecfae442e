"""Roles for operators: `/debug/roles`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from halfmoon_conductor.page.cluster_view import ConductorInfo
from halfmoon_conductor.page.debug_routes import debug_app
from halfmoon_conductor.page.role_routes import MAX_BODY_BYTES
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.tenants import Tenant, Tenants, hash_api_key
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import ChangeRole, Message
from halfmoon_scheduling.events import WorkerJoined
from halfmoon_testing.conductor_http import ScriptedGateway, serve_app
from halfmoon_testing.scheduling_inputs import a_worker
from tests.conductor.fronts import client_of, error_of
from tests.conductor.watched_core import WatchedCore
from tests.schemathesis_run import run_schemathesis

OPERATOR = {"authorization": "Bearer hm-ops"}


class Workers:
    """Keeps the changes of role that workers are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[WorkerId, ChangeRole]] = []

    def send(self, worker_id: WorkerId, message: Message) -> None:
        if isinstance(message, ChangeRole):
            self.asked.append((worker_id, message))

    def refuse(self, worker_id: WorkerId, reason: str) -> None:
        raise AssertionError(reason)


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def conductor(workers: Workers, gateway: ScriptedGateway, tokenizer: HubTokenizer) -> FastAPI:
    """A conductor with tenants and five workers."""
    watched = WatchedCore(ttft_slo_s=1.0, tbt_slo_s=0.1)
    watched.shell.connect(workers, watched.gateway)
    both = ("prefill", "decode")
    for name, roles in (
        ("prefill-0", both), ("decode-0", both), ("rack/decode-1", both), ("decode-9", ()),
        ("kvstore-0", ()),
    ):  # fmt: skip
        info = a_worker(name.removeprefix("rack/"))
        info = msgspec.structs.replace(info, worker_id=WorkerId(name), roles=roles or info.roles)
        watched.shell.post(WorkerJoined(info))
    conductor = ConductorInfo("conductor-0")
    tenants = Tenants(
        (
            Tenant("ops", (hash_api_key("hm-ops"),), operator=True),
            Tenant("lab", (hash_api_key("hm-lab"),)),
        )
    )
    debug = debug_app(watched.observer, watched.links, watched.clock, conductor)
    return create_app(
        gateway,
        tokenizer,
        registry=CollectorRegistry(),
        tenants=tenants,
        extra_mounts=[("/debug", debug)],
    )


@pytest.fixture
async def operator(conductor: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """An operator's client."""
    async with client_of(conductor, headers=OPERATOR) as client:
        yield client


async def row(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    rows = (await client.get("/debug/roles")).json()["workers"]
    (found,) = [each for each in rows if each["worker_id"] == name]
    assert isinstance(found, dict)
    return found


async def test_all_prefill_and_decode_workers_are_shown_with_their_roles(
    operator: httpx.AsyncClient,
) -> None:
    shown = (await operator.get("/debug/roles")).json()
    assert [each["worker_id"] for each in shown["workers"]] == [
        "decode-0", "decode-9", "prefill-0", "rack/decode-1",
    ]  # fmt: skip
    assert (await row(operator, "decode-0")) == {
        "worker_id": "decode-0",
        "role": "decode",
        "roles": ["prefill", "decode"],
        "draining": False,
        "pinned": None,
        "load": 0.0,
        "changing_to": None,
        "has_begun": False,
        "n_asked": 0,
    }
    assert (await row(operator, "decode-9"))["roles"] == ["decode"]
    assert shown["pools"]["decode"] == {"load": 0.0, "n_workers": 3}
    assert (shown["automatic"], shown["next"], shown["now_s"]) == (False, None, 5.0)
    assert "role_changes is off" in shown["reason"]


@pytest.mark.parametrize("name", ["decode-0", "rack/decode-1"])
async def test_a_worker_is_asked_for_the_role_and_pinned_until_it_is_released(
    operator: httpx.AsyncClient, workers: Workers, name: str
) -> None:
    answer = await operator.post(f"/debug/roles/{name}", json={"role": "prefill"})
    assert answer.status_code == 200, answer.text
    asked = answer.json()["worker"]
    assert (asked["worker_id"], asked["pinned"], asked["changing_to"]) == (
        name, "prefill", "prefill",
    )  # fmt: skip
    assert asked == await row(operator, name)
    ((worker_id, message),) = workers.asked
    assert worker_id == name
    assert message.role == "prefill" and "operator" in message.reason
    released = await operator.post(f"/debug/roles/{name}", json={"role": "auto"})
    assert released.json()["worker"]["pinned"] is None


@pytest.mark.parametrize(
    ("name", "body", "status", "param", "words"),
    [
        ("decode-7", {"role": "prefill"}, 404, "worker_id", "'decode-7'"),
        ("decode-9", {"role": "prefill"}, 400, "worker_id", "--roles prefill,decode"),
        ("kvstore-0", {"role": "auto"}, 400, "worker_id", "a kvstore worker alone"),
        ("prefill-0", {"role": "decode"}, 409, "role", "the last prefill worker"),
        ("decode-0", {"role": "auto"}, 409, "role", "pinned to no role"),
        ("decode-0", {"role": "kvstore"}, 400, "role", "'kvstore'"),
        ("decode-0", {"role": ["prefill"]}, 400, "role", "prefill, decode, auto"),
        ("decode-0", {"role": "p" * 500}, 400, "role", "ppp"),
        ("decode-0", {}, 400, "role", "required"),
        ("decode-0", {"role": "prefill", "force": True}, 400, "force", "not known"),
        ("decode-0", ["prefill"], 400, None, "JSON object"),
        ("decode-0", {"role": "prefill" + " " * MAX_BODY_BYTES}, 413, None, str(MAX_BODY_BYTES)),
    ],
)  # fmt: skip
async def test_a_bad_request_is_refused_by_field_and_changes_nothing(
    operator: httpx.AsyncClient,
    workers: Workers,
    name: str,
    body: object,
    status: int,
    param: str | None,
    words: str,
) -> None:
    before = (await operator.get("/debug/roles")).json()
    error = error_of(await operator.post(f"/debug/roles/{name}", json=body), status)
    assert error["param"] == param
    assert words in error["message"] and len(error["message"]) < 300
    assert workers.asked == []
    assert (await operator.get("/debug/roles")).json() == before


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_a_page_of_another_site_could_send_is_refused(
    operator: httpx.AsyncClient, workers: Workers, kind: str
) -> None:
    answer = await operator.post(
        "/debug/roles/decode-0", content=b'{"role": "prefill"}', headers={"content-type": kind}
    )
    assert "application/json" in error_of(answer, 400)["message"]
    assert workers.asked == []


CONFIG = """\
[headers]
Authorization = "Bearer hm-ops"

[parameters]
"path.worker_id" = "decode-0"
"""


@pytest.mark.nightly("that requests which schemathesis draws for roles are answered as documented")
@pytest.mark.random_seeds(1)
async def test_generated_requests_are_answered_as_the_document_says(
    conductor: FastAPI, tmp_path: Path, seed: int
) -> None:
    async with serve_app(conductor) as (host, port):
        await asyncio.to_thread(
            run_schemathesis,
            "conductor-debug.openapi.json",
            f"http://{host}:{port}",
            tmp_path,
            seed=seed,
            config=CONFIG,
        )
