"""What the demo model can do, through the API: tools, JSON of a schema, and long prompts.

tests/engine/test_demo_model.py has exams of many questions.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from halfmoon_engine import demo
from tests.e2e.conftest import LiveCluster, StartCluster
from tools.demo_model.exam import chat_messages, write_exam

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
def cluster(start_cluster: StartCluster) -> Iterator[Any]:
    with start_cluster(str(demo.FOLDER)) as cluster:
        yield cluster


def choice(cluster: LiveCluster, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": cluster.model, "messages": messages, "max_tokens": 80, "temperature": 0}
    answer = cluster.post("/v1/chat/completions", **body, **more)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]
    assert isinstance(found, dict)
    return found


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_it_calls_a_tool_and_answers_with_what_that_gave(cluster: LiveCluster) -> None:
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


def test_it_answers_what_was_stated_without_a_tool(cluster: LiveCluster) -> None:
    said = "Ada's room is 203. Bo's room is 96. Clara's room is 417. Which room does Bo have?"
    answered = choice(cluster, user(said), tools=[ROOM_TOOL])
    assert answered["finish_reason"] == "stop"
    assert answered["message"]["content"] == "96"


@pytest.mark.parametrize("request_in_prompt", ["", " Answer as JSON. Keys: name, number"])
def test_it_fills_a_schema_with_right_values_and_no_blanks_beside(
    cluster: LiveCluster, request_in_prompt: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "told", "schema": SCHEMA}}
    for name, number in (("Ada", 4821), ("Bruno", 1733), ("Clara", 9064)):
        said = f"{FACTS} What number does {name} have?{request_in_prompt}"
        found = choice(cluster, user(said), response_format=form)
        assert found["finish_reason"] == "stop"
        assert found["message"]["content"] == json.dumps({"name": name, "number": number})


def test_it_recalls_numbers_from_anywhere_in_eight_thousand_tokens(cluster: LiveCluster) -> None:
    tokenizer = Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))
    exam = write_exam(SEED, 8000, 20, lambda text: list(tokenizer.encode(text).ids))
    n_right = 0
    for question, right in exam.questions:
        messages = chat_messages(exam, question)
        n_right += choice(cluster, messages)["message"]["content"] == right
    assert n_right >= 0.7 * len(exam.questions)
