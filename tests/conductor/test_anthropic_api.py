"""Anthropic's Messages API."""

from typing import Any

import pytest

from halfmoon_conductor.errors import ServerOverloaded
from tests.conductor.fronts import MESSAGES, TEXT, Front, error_of, events_of


async def test_a_message_is_answered_whole_and_cached_tokens_are_counted_apart(
    front: Front,
) -> None:
    front.gateway.n_cached = 2
    answer = await front.ask(MESSAGES)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "lab/moon",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(front.last.prompt_token_ids) - 2,
            "output_tokens": len(front.gateway.script),
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
        },
    }


@pytest.mark.parametrize(
    ("change", "reason", "sequence"),
    [({"max_tokens": 3}, "max_tokens", None),
     ({"stop_sequences": ["半月", "x"]}, "stop_sequence", "半月"),
     ({}, "end_turn", None)],
)  # fmt: skip
async def test_a_stream_says_what_the_whole_answer_says(
    front: Front, change: dict[str, Any], reason: str, sequence: str | None
) -> None:
    whole = await front.ask(MESSAGES, change)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    streamed = await front.post(MESSAGES, change, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    start, block, ping, *deltas, block_end, end, stop = events_of(streamed.text)
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert (block["type"], ping["type"]) == ("content_block_start", "ping")
    assert {each["delta"]["type"] for each in deltas} == {"text_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == whole["content"][0]["text"]
    assert block_end["type"] == "content_block_stop"
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert end["usage"] == whole["usage"]
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"name": "f"}]}, "input_schema is required"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
         "a thinking block can't be in a turn of the user"),
        ({"mood": 1}, "mood is not known"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, '"image"'),
        ({"max_tokens": 300}, "context is 200"),
    ],
)  # fmt: skip
async def test_errors_have_anthropics_shape(
    front: Front, change: dict[str, Any], told: str
) -> None:
    error = await front.refused(MESSAGES, change)
    assert error.keys() == {"type", "message"}
    assert error["type"] == "invalid_request_error" and told in error["message"]


async def test_so_have_refusals_paths_that_do_not_exist_and_errors_in_mid_stream(
    front: Front,
) -> None:
    unknown = await front.error(MESSAGES, 404, model="lab/sun")
    assert unknown["type"] == "not_found_error" and "lab/sun" in unknown["message"]
    assert error_of(await front.get(MESSAGES), 405).keys() == {"type", "message"}
    missing = error_of(await front.client.post("/v1/messages/none"), 404)
    assert missing["type"] == "not_found_error"
    front.gateway.refusal = ServerOverloaded("busy", 2.0)
    busy = await front.post(MESSAGES, stream=True)
    assert error_of(busy, 429)["type"] == "rate_limit_error"
    assert busy.headers["retry-after"] == "2"
    front.gateway.refusal, front.gateway.failure = None, RuntimeError("swordfish")
    *_, last = await front.stream(MESSAGES)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "swordfish" not in last["error"]["message"]
