"""A response is stored for a time: the next request goes on from it, and only its tenant's can."""

import json
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halfmoon_conductor.routes.item_references import MAX_COMMAS, replace_references
from halfmoon_conductor.stored_responses.response_store import MAX_STORED_BYTES, ResponseStore
from halfmoon_conductor.tenants import Tenants, add_tenant
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_metadata import MetadataError
from halfmoon_metadata.stores.memory_values import MemoryValues
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import RESPONSES, Front, error_of, open_front

pytestmark = pytest.mark.usefixtures("room")
HI = {"role": "user", "content": "Hi"}
SURE = {"role": "user", "content": "Sure?"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = {"tools": [{"type": "function", "name": "f"}]}
Opened = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def opened(gateway: ScriptedGateway, tokenizer: HubTokenizer) -> Opened:
    """Open an app with these responses, and perhaps tenants."""
    return partial(open_front, gateway, tokenizer)


def memory(max_bytes: int = 2**20) -> MemoryValues:
    return MemoryValues(ttl_s=60, max_bytes=max_bytes)


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "seven"}


async def prompt_of(front: Front, **fields: Any) -> str:
    """The whole prompt of such a request."""
    await front.ask(RESPONSES, fields)
    return front.prompt()


async def test_a_conversation_goes_on_from_a_response_as_if_it_had_been_sent_whole(
    front: Front,
) -> None:
    first = await front.ask(RESPONSES, instructions="Be brief.")
    second = await front.ask(RESPONSES, input="Sure?", previous_response_id=first["id"])
    really = {"role": "user", "content": "Really?"}
    third = await front.ask(
        RESPONSES, input=[really], previous_response_id=second["id"], instructions="Be long."
    )
    went_on = front.prompt()
    previous = [each["previous_response_id"] for each in (first, second, third)]
    assert previous == [None, first["id"], second["id"]]
    items = [HI, *first["output"], SURE, *second["output"], really]
    assert went_on == await prompt_of(front, input=items, instructions="Be long.")
    assert "Be brief." not in went_on  # as of OpenAI: instructions are of one response


async def test_a_streamed_response_can_be_gone_on_from_once_it_is_completed(front: Front) -> None:
    response = (await front.stream(RESPONSES))[-1]["response"]
    assert response["store"] is True
    assert "Sure?" in await prompt_of(front, input="Sure?", previous_response_id=response["id"])
    assert (await front.get(f"{RESPONSES}/{response['id']}")).json() == response


async def test_items_of_stored_responses_are_referred_to_by_id(front: Front) -> None:
    first = await front.ask(RESPONSES, TOOLS, input=[HI])
    front.says(CALL)
    refers = [reference(each) for each in first["output"]]
    (called,) = (await front.ask(RESPONSES, TOOLS, input=[HI, *refers, SURE]))["output"]
    conversation = [HI, *refers, SURE, reference(called), result_of(called)]
    assert (await front.ask(RESPONSES, TOOLS, input=conversation))["store"] is True
    by_id = front.prompt()
    whole = [HI, *first["output"], SURE, called, result_of(called)]
    assert by_id == await prompt_of(front, **TOOLS, input=whole)
    assert "seven" in by_id and '"name": "f"' in by_id
    # The last response has the conversation before it: the first need not be stored any more.
    await front.delete(f"{RESPONSES}/{first['id']}")
    assert by_id == await prompt_of(front, **TOOLS, input=conversation)


async def test_an_item_is_referred_to_beside_the_response_that_is_gone_on_from(
    front: Front,
) -> None:
    first, other = await front.ask(RESPONSES), await front.ask(RESPONSES, input="Bye")
    asked = [reference(other["output"][0]), SURE]
    by_id = await prompt_of(front, input=asked, previous_response_id=first["id"])
    whole = [HI, *first["output"], *other["output"], SURE]
    assert by_id == await prompt_of(front, input=whole)


async def test_an_item_that_is_not_stored_or_has_no_id_is_refused_by_name(front: Front) -> None:
    for name in ("msg_2", "msg_", "msg_a_b", "rs_{}", "fc_" + "a" * 500, "", "msg_1\n"):
        asked = [HI, {"type": "item_reference", "id": name}]
        error = await front.error(RESPONSES, 404, input=asked)
        assert (error["code"], error["param"]) == ("item_not_found", "input")
        assert "input[1]" in error["message"] and len(error["message"]) < 400
    wrong: list[dict[str, Any]] = [{"id": 3}, {}, {"id": None}, {"id": []}]
    for fields in wrong:
        error = await front.refused(RESPONSES, input=[{"type": "item_reference", **fields}])
        assert error["param"].startswith("input")


async def test_references_are_bounded(front: Front) -> None:
    kept = [reference((await front.ask(RESPONSES))["output"][0]) for _ in range(17)]
    for asked, says in [([*kept, kept[0]], "twice"), (kept, "more than 16")]:
        error = await front.refused(RESPONSES, input=asked)
        assert error["param"] == "input" and says in error["message"]
    await front.ask(RESPONSES, input=kept[:16])


async def test_an_input_of_many_commas_is_searched_for_no_reference(front: Front) -> None:
    async def find(name: str) -> None:
        raise AssertionError(name)

    commas = {"role": "user", "content": "," * (MAX_COMMAS + 1)}
    refers = {"type": "item_reference", "id": "msg_1"}
    text = json.dumps(commas).encode()
    assert await replace_references(text, find) is None
    assert await replace_references(json.dumps(refers).encode() + b"," + text, find) is None
    error = await front.refused(RESPONSES, input=[refers, commas])
    assert error["param"] == "input[0].type"
    assert f"{MAX_COMMAS:,} commas" in error["message"]


async def test_an_escaped_reference_is_one_too(front: Front) -> None:
    first = await front.ask(RESPONSES)
    asked = [reference(first["output"][0]), SURE]
    body = json.dumps({"model": "lab/moon", "input": asked})
    answer = await front.send(RESPONSES, body.replace("item_reference", "item\\u005freference"))
    assert answer.status_code == 200, answer.text
    error_of(await front.send(RESPONSES, body.encode("utf-16")), 400)


async def test_long_conversations_go_on_too(front: Front) -> None:
    words = "moon " * 20_000  # read by a thread or process: over what the event loop reads
    first = await front.ask(RESPONSES, input=words)
    assert first["store"] is True
    prompt = await prompt_of(front, input="Sure?", previous_response_id=first["id"])
    assert prompt.count("moon") >= 20_000 and "Sure?" in prompt


async def test_a_response_is_returned_and_removed_by_its_id(front: Front) -> None:
    kept = await front.ask(RESPONSES)
    path = f"{RESPONSES}/{kept['id']}"
    assert (await front.get(path)).json() == kept
    removed = await front.delete(path)
    assert removed.json() == {"id": kept["id"], "object": "response", "deleted": True}
    for answer in (await front.get(path), await front.delete(path)):
        assert error_of(answer, 404)["code"] == "response_not_found"


async def test_what_is_not_stored_is_refused_by_name(front: Front) -> None:
    for name in ("resp_2", "resp_", "chatcmpl-1", "resp_a{b}", "resp_" + "a" * 500):
        error = await front.refused(RESPONSES, previous_response_id=name)
        assert error["param"] == "previous_response_id"
        assert error["code"] == "previous_response_not_found"
        assert "kept for 60 s" in error["message"] and "whole conversation" in error["message"]
        assert (await front.get(f"{RESPONSES}/{name}")).status_code == 404


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
    front: Front, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "lab/moon", "input": "Hi", "previous_response_id": "resp_1", **fields}
    assert (await front.refused(RESPONSES, body))["param"] == param
    broken = error_of(await front.send(RESPONSES, json.dumps(body)[:-1]), 400)
    assert "not valid JSON" in broken["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32"])
async def test_a_response_is_gone_on_from_or_refused_however_its_field_is_written(
    front: Front, encoding: str
) -> None:
    body = json.dumps({"model": "lab/moon", "input": "Sure?", "previous_response_id": "resp_1"})
    for text in (body, body.replace("_response", "\\u005fresponse")):
        answer = await front.send(RESPONSES, text.encode(encoding))
        if encoding == "utf-8":
            assert answer.status_code == 200, answer.text
            assert "Half." in front.prompt()
        else:
            assert answer.status_code == 400
            assert not front.gateway.requests


async def test_nothing_is_stored_against_the_clients_will_or_the_settings(
    front: Front, opened: Opened
) -> None:
    async with opened() as plain:
        for door, fields in ((front, {"store": False}), (plain, {})):
            kept = await door.ask(RESPONSES, fields)
            assert kept["store"] is False
            assert (await door.get(f"{RESPONSES}/{kept['id']}")).status_code == 404
        error = await plain.refused(RESPONSES, previous_response_id=kept["id"])
        assert (error["code"], error["param"]) == ("not_supported", "previous_response_id")
        error = await plain.refused(RESPONSES, input=[reference(kept["output"][0])])
        assert (error["code"], error["param"]) == ("not_supported", "input")


async def test_another_tenants_response_is_as_one_that_never_was(
    opened: Opened, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    ann, bob = ({"authorization": f"Bearer {add_tenant(file, name)}"} for name in ("ann", "bob"))
    store = ResponseStore(memory(), 60)
    async with opened(responses=store, tenants=Tenants.read(file)) as front:

        async def ask(who: dict[str, str], **fields: Any) -> Any:
            body = json.dumps({"model": "lab/moon", "input": "Hi", **fields})
            return await front.send(RESPONSES, body, **who)

        response = (await ask(ann)).json()
        kept, refers = response["id"], [reference(response["output"][0])]
        assert (await ask(ann, input=refers)).status_code == 200
        error_of(await ask(bob, input=refers), 404)
        assert (await ask(ann, previous_response_id=kept)).status_code == 200
        others = error_of(await ask(bob, previous_response_id=kept), 400)
        never = error_of(await ask(bob, previous_response_id=kept[:-1] + "x"), 400)
        assert others["code"] == never["code"]
        for call in (front.get, front.delete):
            error_of(await call(f"{RESPONSES}/{kept}", headers=bob), 404)
        error_of(await front.get(f"{RESPONSES}/{kept}"), 401)
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
    async with opened(responses=store) as front:
        kept = (await front.ask(RESPONSES))["id"]
        values.fails = True
        assert (await front.ask(RESPONSES))["store"] is False
        n_calls = values.n_calls
        assert (await front.ask(RESPONSES))["store"] is False
        assert values.n_calls == n_calls  # it rests
        error = await front.error(RESPONSES, 503, previous_response_id=kept)
        assert "can't be read at present" in error["message"]
        values.fails, now[0] = False, 5.0
        assert (await front.ask(RESPONSES, previous_response_id=kept))["store"] is True


async def test_a_store_that_hangs_holds_up_an_answer_for_its_limit_alone(opened: Opened) -> None:
    values, over = Failing(ttl_s=60, max_bytes=2**20), threading.Event()
    values.hangs = over
    try:
        async with opened(responses=ResponseStore(values, 60, call_limit_s=0.05)) as front:
            assert (await front.ask(RESPONSES))["store"] is False
            await front.error(RESPONSES, 503, previous_response_id="resp_1")
    finally:
        over.set()


async def test_what_is_kept_of_a_body_is_bounded_and_too_much_is_not_stored(
    opened: Opened,
) -> None:
    sizes = ((90_000, 1, False), (90_000, 5_000, True), (9_000, 1, True))
    async with opened(responses=ResponseStore(memory(2**30), 60)) as front:
        for label, words, stored in (*sizes, (MAX_STORED_BYTES, 1, False)):
            item = {"role": "user", "content": "moon " * words, "id": "a" * label}
            assert (await front.ask(RESPONSES, input=[item]))["store"] is stored
