"""docs/api.md and the front say the same of every field: none is ignored in silence."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from halfmoon_conductor.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.testing import ScriptedGateway
from halfmoon_conductor.tokenizer import HubTokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, {"model": "lab/moon", "prompt": "Say it", "seed": 1}),
    CHAT: (
        ChatRequest,
        {"model": "lab/moon", "messages": [{"role": "user", "content": "Hi"}], "seed": 1},
    ),
}
#: Request fields of vLLM's server (its request classes on the main branch, seen 2026-11).
VLLM_SHARED = {
    "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "echo",
    "ec_transfer_params", "frequency_penalty", "ignore_eos", "include_stop_str_in_output",
    "kv_transfer_params", "length_penalty", "logit_bias", "logprob_token_ids", "logprobs",
    "max_tokens", "min_p", "min_tokens", "model", "n", "presence_penalty", "priority",
    "prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id",
    "response_format", "return_mm_kwargs", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "routed_experts_prompt_start", "seed", "session_id",
    "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "stream",
    "stream_interval", "stream_options", "structured_outputs", "temperature",
    "thinking_token_budget", "top_k", "top_p", "truncate_prompt_tokens", "truncation_side",
    "use_beam_search", "user", "vllm_xargs", "watermarking",
}  # fmt: skip
VLLM_FIELDS = {
    COMPLETIONS: {*VLLM_SHARED, "prompt", "prompt_embeds", "suffix"},
    CHAT: {
        *VLLM_SHARED, "add_generation_prompt", "chat_template", "chat_template_kwargs",
        "continue_final_message", "documents", "include_reasoning", "max_completion_tokens",
        "media_io_kwargs", "messages", "mm_processor_kwargs", "parallel_tool_calls",
        "reasoning_effort", "return_prompt_text", "tool_choice", "tools", "top_logprobs",
    },
}  # fmt: skip

_ROW = re.compile(
    r"^\| `(\w+)` \| (works|refused|label|–) \| (works|refused|label|–) \| `(\{.*\})` \|", re.M
)


class Case(NamedTuple):
    path: str
    field: str
    mark: str
    example: dict[str, Any]


CASES = [
    Case(path, field, mark, json.loads(example))
    for field, completions, chat, example in _ROW.findall(PAGE.read_text())
    for path, mark in ((COMPLETIONS, completions), (CHAT, chat))
    if mark != "–"
]


@pytest.mark.parametrize("path", ROUTES)
def test_the_page_lists_every_field_that_a_route_knows_once(path: str) -> None:
    listed = [case.field for case in CASES if case.path == path]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(ROUTES[path][0].model_fields)


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_of_vllms_server_is_known(path: str) -> None:
    assert not VLLM_FIELDS[path] - set(ROUTES[path][0].model_fields)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.path[4:]}-{case.field}")
async def test_every_field_does_what_the_page_says(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, specials = tokenizer.encode, list[bool]()

    def watched(text: str, *, add_special_tokens: bool) -> list[int]:
        # This model has no BOS: whether it was to be there shows only here.
        specials.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", watched)

    async def outcome(body: dict[str, Any]) -> Any:
        specials.clear()
        answer = await client.post(case.path, json=body)
        text = re.sub(r'"(id|created)":("[^"]*"|\d+)', "", answer.text)
        made = [msgspec.structs.replace(each, request_id="") for each in gateway.requests]
        gateway.requests.clear()
        return answer.status_code, text, [made, *specials]

    base = {**ROUTES[case.path][1], **case.example}
    without = {**base, case.field: ROUTES[case.path][1].get(case.field)}
    before = await outcome(without)
    assert before[0] == 200, before
    status, text, made = await outcome(base)
    match case.mark:
        case "refused":
            error = json.loads(text)["error"]
            assert (status, error["param"], error["code"]) == (400, case.field, "not_supported")
            assert f"{case.field} is not supported" in error["message"]
            assert made == [[]]
        case "label":
            assert (status, text, made) == before
        case _:
            assert (status, text, made) != before
