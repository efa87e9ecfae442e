"""What the demo model can do, through the API: tools, JSON of a schema, and long prompts."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from halfmoon_engine import demo
from tools.demo_model.exam import chat_messages, write_exam, write_json_exam, write_tool_exam

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SEED = 30_000
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
FACTS = "Ada has the number 4821. Bruno has the number 1733. Clara has the number 9064."
ROOM_TOOL = {
    "type": "function",
    "function": {
        "name": "get_room",
        "description": "Find the room of a person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


@pytest.fixture(scope="module")
def cluster(start_cluster: Any) -> Iterator[Any]:
    with start_cluster(str(demo.FOLDER)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def encode() -> Any:
    tokenizer = Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def choice(cluster: Any, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": cluster.model, "messages": messages, "max_tokens": 80, "temperature": 0}
    answer = cluster.post("/v1/chat/completions", **body, **more)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]
    assert isinstance(found, dict)
    return found


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_it_calls_a_tool_and_answers_with_what_that_gave(cluster: Any) -> None:
    messages = user("Which room is Clara in?")
    called = choice(cluster, messages, tools=[ROOM_TOOL])
    assert called["finish_reason"] == "tool_calls"
    (call,) = called["message"]["tool_calls"]
    assert call["function"]["name"] == "get_room"
    assert json.loads(call["function"]["arguments"]) == {"name": "Clara"}
    messages += [
        called["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "417"},
    ]
    answered = choice(cluster, messages, tools=[ROOM_TOOL])
    assert answered["finish_reason"] == "stop"
    assert answered["message"]["content"] == "417"


def test_it_answers_what_was_stated_without_a_tool(cluster: Any) -> None:
    said = "Ada's room is 203. Bo's room is 96. Clara's room is 417. Which room does Bo have?"
    answered = choice(cluster, user(said), tools=[ROOM_TOOL])
    assert answered["finish_reason"] == "stop"
    assert answered["message"]["content"] == "96"


def test_it_chooses_tools_and_their_arguments_beside_a_story(cluster: Any, encode: Any) -> None:
    n_right = n_asked = 0
    for seed in range(SEED, SEED + 4):
        exam = write_tool_exam(seed, 400, 4, encode)
        for asked in (*exam.stated, *exam.calls, *exam.results):
            messages = [*chat_messages(exam, asked.question), *asked.messages]
            said = choice(cluster, messages, tools=exam.tools)["message"]
            right = asked.answer
            if right.startswith("<tool_call>"):
                expected = json.loads(right.splitlines()[1])
                calls = [call["function"] for call in said.get("tool_calls") or []]
                n_right += [
                    {"name": call["name"], "arguments": json.loads(call["arguments"])}
                    for call in calls
                ] == [expected]
            else:
                n_right += said["content"] == right
            n_asked += 1
    assert n_asked == 48
    assert n_right >= 0.8 * n_asked


@pytest.mark.parametrize("request_in_prompt", ["", " Answer as JSON. Keys: name, number"])
@pytest.mark.parametrize(("name", "number"), [("Ada", 4821), ("Bruno", 1733), ("Clara", 9064)])
def test_it_fills_a_schema_with_right_values_and_no_blanks_beside(
    cluster: Any, name: str, number: int, request_in_prompt: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "told", "schema": SCHEMA}}
    said = f"{FACTS} What number does {name} have?{request_in_prompt}"
    found = choice(cluster, user(said), response_format=form)
    assert found["finish_reason"] == "stop"
    expected = {"name": name, "number": number}
    assert json.loads(found["message"]["content"]) == expected
    assert found["message"]["content"] == json.dumps(expected)


def test_it_fills_schemas_beside_a_story(cluster: Any, encode: Any) -> None:
    n_right = n_asked = 0
    for seed in range(SEED, SEED + 4):
        exam = write_json_exam(seed, 400, 5, encode)
        for question, right in exam.questions:
            expected = json.loads(right)
            properties = {
                key: {"type": "integer" if isinstance(value, int) else "string"}
                for key, value in expected.items()
            }
            schema = SCHEMA | {"properties": properties, "required": list(properties)}
            form = {"type": "json_schema", "json_schema": {"name": "told", "schema": schema}}
            found = choice(cluster, chat_messages(exam, question), response_format=form)
            assert found["finish_reason"] == "stop", found
            text = found["message"]["content"]
            assert len(text) <= len(right) + 16
            n_right += json.loads(text) == expected
            n_asked += 1
    assert n_asked == 20
    assert n_right >= 0.8 * n_asked


def test_it_recalls_numbers_from_anywhere_in_eight_thousand_tokens(
    cluster: Any, encode: Any
) -> None:
    exam = write_exam(SEED, 8000, 20, encode)
    n_right = 0
    for question, right in exam.questions:
        messages = chat_messages(exam, question)
        n_right += choice(cluster, messages)["message"]["content"] == right
    assert n_right >= 0.7 * len(exam.questions)
