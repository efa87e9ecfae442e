"""A response is stored for a time: the next request goes on from it, and only its tenant's can."""

import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.routes.item_references import MAX_COMMAS, replace_references
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.stored_responses.response_store import MAX_STORED_BYTES, ResponseStore
from halfmoon_conductor.tenants import Tenants, add_tenant
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_metadata import MetadataError
from halfmoon_metadata.stores.memory_values import MemoryValues
from halfmoon_testing.conductor_http import ScriptedGateway

RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {"model": "lab/moon", "input": "Hi"}
Opened = Callable[..., Any]


@pytest.fixture
def card() -> ModelCard:
    return ModelCard(name="lab/moon", max_context=200_000, created=1_700_000_000)


@pytest.fixture
def opened(gateway: ScriptedGateway, tokenizer: HubTokenizer) -> Opened:
    """Open a client of an app with these responses, and perhaps tenants."""

    @asynccontextmanager
    async def open_app(
        store: ResponseStore | None, **more: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        registry = CollectorRegistry()
        app = create_app(gateway, tokenizer, registry=registry, responses=store, **more)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            yield client

    return open_app


async def answered(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(RESPONSES, json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


def last_prompt(gateway: ScriptedGateway, tokenizer: HubTokenizer) -> str:
    return tokenizer.decode(gateway.requests[-1].prompt_token_ids)


async def test_a_conversation_goes_on_from_a_response_as_if_it_had_been_sent_whole(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer, card: ModelCard
) -> None:
    first = await answered(client, instructions="Be brief.")
    second = await answered(client, input="Sure?", previous_response_id=first["id"])
    third = await answered(
        client,
        input=[{"role": "user", "content": "Really?"}],
        previous_response_id=second["id"],
        instructions="Be long.",
    )
    went_on = last_prompt(gateway, tokenizer)
    assert [each["previous_response_id"] for each in (first, second, third)] == [
        None, first["id"], second["id"],
    ]  # fmt: skip
    items = [
        {"role": "user", "content": "Hi"}, *first["output"],
        {"role": "user", "content": "Sure?"}, *second["output"],
        {"role": "user", "content": "Really?"},
    ]  # fmt: skip
    await answered(client, input=items, instructions="Be long.")
    assert went_on == last_prompt(gateway, tokenizer)
    assert "Be brief." not in went_on  # as of OpenAI: instructions are of one response


async def test_a_streamed_response_can_be_gone_on_from_once_it_is_completed(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    streamed = await client.post(RESPONSES, json={**ASKED, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line[:5] == "data:"]
    response = events[-1]["response"]
    assert response["store"] is True
    await answered(client, input="Sure?", previous_response_id=response["id"])
    assert "Sure?" in last_prompt(gateway, tokenizer)
    stored = await client.get(f"{RESPONSES}/{response['id']}")
    assert stored.json() == response


async def test_branches_of_a_conversation_do_not_meet(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    first = (await answered(client))["id"]
    for question in ("One?", "Two?"):
        await answered(client, input=question, previous_response_id=first)
    assert "One?" not in last_prompt(gateway, tokenizer)


async def test_calls_and_their_results_are_part_of_it(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    gateway.script = [*tokenizer.encode(call, add_special_tokens=False), 0]
    tools = [{"type": "function", "name": "f"}]
    first = await answered(client, tools=tools)
    (called,) = first["output"]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "seven"}
    await answered(client, tools=tools, input=[result], previous_response_id=first["id"])
    prompt = last_prompt(gateway, tokenizer)
    assert "seven" in prompt and '"name": "f"' in prompt


async def test_items_of_stored_responses_are_referred_to_by_id(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    hello = {"role": "user", "content": "Hi"}
    tools = [{"type": "function", "name": "f"}]
    first = await answered(client, input=[hello], tools=tools)
    gateway.script = [*tokenizer.encode(call, add_special_tokens=False), 0]
    more = {"role": "user", "content": "Sure?"}
    refers = [reference(each) for each in first["output"]]
    second = await answered(client, input=[hello, *refers, more], tools=tools)
    (called,) = second["output"]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "seven"}
    conversation = [hello, *refers, more, reference(called), result]
    third = await answered(client, input=conversation, tools=tools)
    assert third["store"] is True
    by_id = last_prompt(gateway, tokenizer)
    whole = [hello, *first["output"], more, called, result]
    await answered(client, input=whole, tools=tools)
    assert by_id == last_prompt(gateway, tokenizer)
    assert "seven" in by_id and '"name": "f"' in by_id
    # The last response has the conversation before it: the first need not be stored any more.
    await client.delete(f"{RESPONSES}/{first['id']}")
    await answered(client, input=conversation, tools=tools)
    assert by_id == last_prompt(gateway, tokenizer)


async def test_an_item_is_referred_to_beside_the_response_that_is_gone_on_from(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    first, other = await answered(client), await answered(client, input="Bye")
    asked = [reference(other["output"][0]), {"role": "user", "content": "Sure?"}]
    await answered(client, input=asked, previous_response_id=first["id"])
    by_id = last_prompt(gateway, tokenizer)
    whole = [{"role": "user", "content": "Hi"}, *first["output"], *other["output"], asked[1]]
    await answered(client, input=whole)
    assert by_id == last_prompt(gateway, tokenizer)


@pytest.mark.parametrize(
    "name", ["msg_2", "msg_", "msg_a_b", "rs_{}", "fc_" + "a" * 500, "", "msg_1\n"]
)
async def test_an_item_that_is_not_stored_is_refused_by_name(
    client: httpx.AsyncClient, name: str
) -> None:
    asked = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": name}]
    answer = await client.post(RESPONSES, json={**ASKED, "input": asked})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "item_not_found", "input")
    assert "input[1]" in error["message"] and len(error["message"]) < 400


async def test_references_are_bounded(client: httpx.AsyncClient) -> None:
    kept = [(await answered(client))["output"][0] for _ in range(17)]
    for items, says in [([*kept, kept[0]], "twice"), (kept, "more than 16")]:
        asked = [reference(each) for each in items]
        answer = await client.post(RESPONSES, json={**ASKED, "input": asked})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input")
        assert says in error["message"]
    asked = [reference(each) for each in kept[:16]]
    assert (await client.post(RESPONSES, json={**ASKED, "input": asked})).status_code == 200


async def test_an_input_of_many_commas_is_searched_for_no_reference(
    client: httpx.AsyncClient,
) -> None:
    async def find(name: str) -> None:
        raise AssertionError(name)

    texts = json.dumps({"role": "user", "content": "," * (MAX_COMMAS + 1)}).encode()
    refers = json.dumps({"type": "item_reference", "id": "msg_1"}).encode()
    assert await replace_references(texts, find) is None
    assert await replace_references(refers + b"," + texts, find) is None
    asked = [json.loads(refers), json.loads(texts)]
    answer = await client.post(RESPONSES, json={**ASKED, "input": asked})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[0].type")
    assert f"{MAX_COMMAS:,} commas" in error["message"]


@pytest.mark.parametrize("fields", [{"id": 3}, {}, {"id": None}, {"id": []}])
async def test_a_reference_without_an_id_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    asked = [{"type": "item_reference", **fields}]
    answer = await client.post(RESPONSES, json={**ASKED, "input": asked})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("input")


async def test_an_escaped_reference_is_one_too(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    first = await answered(client)
    asked = {"role": "user", "content": "Sure?"}
    body = json.dumps({**ASKED, "input": [reference(first["output"][0]), asked]})
    escaped = body.replace("item_reference", "item\\u005freference")
    headers = {"content-type": "application/json"}
    answer = await client.post(RESPONSES, content=escaped, headers=headers)
    assert answer.status_code == 200, answer.text
    answer = await client.post(RESPONSES, content=body.encode("utf-16"), headers=headers)
    assert answer.status_code == 400


async def test_long_conversations_go_on_too(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    words = "moon " * 20_000  # read by a thread or process: over what the event loop reads
    first = await answered(client, input=words)
    assert first["store"] is True
    await answered(client, input="Sure?", previous_response_id=first["id"])
    prompt = last_prompt(gateway, tokenizer)
    assert prompt.count("moon") >= 20_000 and "Sure?" in prompt


async def test_a_response_is_returned_and_removed_by_its_id(client: httpx.AsyncClient) -> None:
    kept = await answered(client)
    path = f"{RESPONSES}/{kept['id']}"
    assert (await client.get(path)).json() == kept
    removed = await client.delete(path)
    assert removed.json() == {"id": kept["id"], "object": "response", "deleted": True}
    for answer in (await client.get(path), await client.delete(path)):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "response_not_found"


@pytest.mark.parametrize(
    "name", ["resp_2", "resp_", "chatcmpl-1", "resp_a{b}", "resp_" + "a" * 500]
)
async def test_what_is_not_stored_is_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post(RESPONSES, json={**ASKED, "previous_response_id": name})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "previous_response_not_found"
    assert "kept for 60 s" in error["message"] and "whole conversation" in error["message"]
    assert (await client.get(f"{RESPONSES}/{name}")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"input": [{"role": "moon", "content": "a"}]}, "input[2].role"),
        ({"mood": "a"}, "mood"),
    ],
)
async def test_the_rest_of_a_body_is_checked_as_ever(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    body = {**ASKED, "previous_response_id": "resp_1", **fields}
    answer = await client.post(RESPONSES, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    broken = await client.post(
        RESPONSES, content=json.dumps(body)[:-1], headers={"content-type": "application/json"}
    )
    assert "not valid JSON" in broken.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32"])
async def test_a_response_is_gone_on_from_or_refused_however_its_field_is_written(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer, encoding: str
) -> None:
    body = json.dumps({**ASKED, "input": "Sure?", "previous_response_id": "resp_1"})
    for text in (body, body.replace("_response", "\\u005fresponse")):
        answer = await client.post(
            RESPONSES, content=text.encode(encoding), headers={"content-type": "application/json"}
        )
        if encoding == "utf-8":
            assert answer.status_code == 200, answer.text
            assert "Half." in last_prompt(gateway, tokenizer)
        else:
            assert answer.status_code == 400
            assert not gateway.requests


async def test_nothing_is_stored_against_the_clients_will_or_the_settings(
    client: httpx.AsyncClient, opened: Opened
) -> None:
    kept = await answered(client, store=False)
    assert kept["store"] is False
    assert (await client.get(f"{RESPONSES}/{kept['id']}")).status_code == 404
    async with opened(None) as plain:
        kept = await answered(plain)
        assert kept["store"] is False
        assert (await plain.get(f"{RESPONSES}/{kept['id']}")).status_code == 404
        body = {**ASKED, "previous_response_id": kept["id"]}
        error = (await plain.post(RESPONSES, json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("not_supported", "previous_response_id")
        body = {**ASKED, "input": [reference(kept["output"][0])]}
        error = (await plain.post(RESPONSES, json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("not_supported", "input")


async def test_another_tenants_response_is_as_one_that_never_was(
    opened: Opened, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    ann, bob = add_tenant(file, "ann"), add_tenant(file, "bob")
    store = ResponseStore(MemoryValues(ttl_s=60, max_bytes=2**20), 60)
    async with opened(store, tenants=Tenants.read(file)) as client:

        async def ask(key: str, **fields: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            body = {**ASKED, **fields}
            answer: httpx.Response = await client.post(RESPONSES, json=body, headers=headers)
            return answer

        response = (await ask(ann)).json()
        kept, refers = response["id"], [reference(response["output"][0])]
        assert (await ask(ann, input=refers)).status_code == 200
        assert (await ask(bob, input=refers)).status_code == 404
        assert (await ask(ann, previous_response_id=kept)).status_code == 200
        others = await ask(bob, previous_response_id=kept)
        never = await ask(bob, previous_response_id=kept[:-1] + "x")
        assert others.status_code == never.status_code == 400
        assert others.json()["error"]["code"] == never.json()["error"]["code"]
        for call in (client.get, client.delete):
            answer = await call(f"{RESPONSES}/{kept}", headers={"authorization": f"Bearer {bob}"})
            assert answer.status_code == 404
        assert (await client.get(f"{RESPONSES}/{kept}")).status_code == 401
        assert (await ask(ann, previous_response_id=kept)).status_code == 200


class Failing(MemoryValues):
    """Values of a server that goes away and comes back."""

    fails = False
    #: Calls wait for it; None: they don't.
    hangs: threading.Event | None = None
    n_calls = 0

    def put(self, owner: str, name: str, value: bytes) -> bool:
        self._check()
        return super().put(owner, name, value)

    def get(self, owner: str, name: str) -> bytes | None:
        self._check()
        return super().get(owner, name)

    def _check(self) -> None:
        self.n_calls += 1
        if self.hangs is not None:
            self.hangs.wait(60)
        if self.fails:
            raise MetadataError("metadata server redis://x: gone")


async def test_a_store_that_fails_costs_no_answer_and_rests(opened: Opened) -> None:
    values, now = Failing(ttl_s=60, max_bytes=2**20), [0.0]
    store = ResponseStore(values, 60, clock=lambda: now[0])
    async with opened(store) as client:
        kept = (await answered(client))["id"]
        values.fails = True
        assert (await answered(client))["store"] is False
        n_calls = values.n_calls
        assert (await answered(client))["store"] is False
        assert values.n_calls == n_calls  # it rests
        body = {**ASKED, "previous_response_id": kept}
        answer = await client.post(RESPONSES, json=body)
        assert answer.status_code == 503
        assert "can't be read at present" in answer.json()["error"]["message"]
        values.fails, now[0] = False, 5.0
        assert (await answered(client, previous_response_id=kept))["store"] is True


async def test_a_store_that_hangs_holds_up_an_answer_for_its_limit_alone(opened: Opened) -> None:
    values, over = Failing(ttl_s=60, max_bytes=2**20), threading.Event()
    values.hangs = over
    store = ResponseStore(values, 60, call_limit_s=0.05)
    try:
        async with opened(store) as client:
            assert (await answered(client))["store"] is False
            body = {**ASKED, "previous_response_id": "resp_1"}
            assert (await client.post(RESPONSES, json=body)).status_code == 503
    finally:
        over.set()


async def test_what_is_kept_of_a_body_is_bounded_by_its_prompt(opened: Opened) -> None:
    async with opened(ResponseStore(MemoryValues(ttl_s=60, max_bytes=2**30), 60)) as client:
        for label, words, stored in ((90_000, 1, False), (90_000, 5_000, True), (9_000, 1, True)):
            item = {"role": "user", "content": "moon " * words, "id": "a" * label}
            assert (await answered(client, input=[item]))["store"] is stored


async def test_what_is_too_large_is_answered_and_not_stored(opened: Opened) -> None:
    async with opened(ResponseStore(MemoryValues(ttl_s=60, max_bytes=2**30), 60)) as client:
        metadata = "a" * MAX_STORED_BYTES
        items = [{"role": "user", "content": "Hi", "id": metadata}]
        assert (await answered(client, input=items))["store"] is False


async def test_openais_client_goes_on_from_a_response(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    ours: Any = openai.AsyncOpenAI(
        base_url="http://front/v1", api_key="none", http_client=cast(Any, client)
    )
    first = await ours.responses.create(model="lab/moon", input="Hi")
    again = await ours.responses.create(
        model="lab/moon", input="Sure?", previous_response_id=first.id
    )
    assert again.previous_response_id == first.id
    assert (await ours.responses.retrieve(first.id)).output_text == first.output_text
    await ours.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await ours.responses.retrieve(first.id)
