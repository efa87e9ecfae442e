"""docs/api.md and the REST API agree on every field: none is ignored silently."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from halfmoon_conductor.api.anthropic.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.api.tokenize_models import DetokenizeRequest, TokenizeRequest
from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from tests.conductor.api_page import PageCase, page_cases
from tests.conductor.fronts import (
    BODIES,
    CHAT,
    COMPLETIONS,
    COUNT,
    DETOKENIZE,
    HELLO,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Front,
)  # fmt: skip

#: Routes by the names of their columns: the class that reads a body, and what a body has besides.
ROUTES: dict[str, tuple[str, type[BaseModel], dict[str, Any]]] = {
    "completions": (COMPLETIONS, CompletionRequest, {"seed": 1}),
    "chat": (CHAT, ChatRequest, {"seed": 1}),
    "responses": (RESPONSES, ResponsesRequest, {"seed": 1}),
    "messages": (MESSAGES, MessagesRequest, {"max_tokens": 40}),
    "count_tokens": (COUNT, CountTokensRequest, {}),
    "tokenize": (TOKENIZE, TokenizeRequest, {"messages": HELLO}),
    "detokenize": (DETOKENIZE, DetokenizeRequest, {"tokens": [70]}),
}
#: Names that the request classes of vLLM's server have, by route. tests/clients compares them
#: with vLLM's own classes.
VLLM_FIELDS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("vllm_fields.json").read_text()
)["routes"]
CASES = list(page_cases())


@pytest.mark.parametrize("route", ROUTES)
def test_the_page_lists_every_field_that_a_route_knows_once_and_every_field_of_vllms(
    route: str,
) -> None:
    path, shape, _ = ROUTES[route]
    listed = [case.field for case in CASES if case.route == route]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(shape.model_fields)
    assert not set(VLLM_FIELDS[path]) - set(listed)


def test_routes_whose_requests_vllm_reads_are_all_here() -> None:
    assert set(VLLM_FIELDS) == {path for path, _, _ in ROUTES.values()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.route}-{case.field}")
async def test_every_field_does_what_the_page_says(
    front: Front, tokenizer: HubTokenizer, case: PageCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, specials = tokenizer.encode, list[bool]()

    def watched(text: str, *, add_special_tokens: bool) -> list[int]:
        # This model has no BOS: whether it was to be there shows only here.
        specials.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", watched)
    path, _, more = ROUTES[case.route]
    fine = BODIES[path] | more

    async def outcome(body: dict[str, Any]) -> Any:
        specials.clear()
        answer = await front.send(path, json.dumps(body))
        text = _NAMES.sub("", answer.text)
        made = [_nameless(each, dice="seed" in fine) for each in front.gateway.requests]
        front.gateway.requests.clear()
        return answer.status_code, text, [made, *specials]

    base = {**fine, **case.example}
    without = {**base, case.field: fine.get(case.field)}
    if case.route == "tokenize" and case.field == "prompt":
        without = fine  # a prompt is there in place of messages
    before = await outcome(without)
    assert before[0] == 200, before
    status, text, made = await outcome(base)
    match case.mark:
        case "refused":
            error = json.loads(text)["error"]
            assert f"{case.field} is not supported" in error["message"]
            assert status == 400
            if "messages" not in path:  # Anthropic's errors have no place for it
                assert (error["param"], error["code"]) == (case.field, "not_supported")
            assert made == [[]]
        case "label":
            assert (status, text, made) == before
        case _:
            assert (status, text, made) != before


#: What no two answers share, and labels that an answer repeats.
_NAMES = re.compile(
    r'"(id|created|created_at|user|safety_identifier|prompt_cache_key|prompt_cache_retention)":'
    r'("[^"]*"|\d+|null)|"(metadata|reasoning)":\{[^}]*\}'
)


def _nameless(request: GenerationRequest, *, dice: bool) -> GenerationRequest:
    """Without what differs between equal requests: the id, and dice that nobody asked for."""
    sampling = request.sampling if dice else msgspec.structs.replace(request.sampling, seed=0)
    return msgspec.structs.replace(request, request_id="", sampling=sampling)
