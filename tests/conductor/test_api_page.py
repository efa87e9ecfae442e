"""docs/api.md and the REST API agree on every field: none is ignored silently."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from halfmoon_conductor.api.anthropic.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.api.tokenize_models import DetokenizeRequest, TokenizeRequest
from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HELLO = [{"role": "user", "content": "Hi"}]
#: Routes by the names of their columns: the class that reads a body, and a body that is fine.
ROUTES: dict[str, tuple[str, type[BaseModel], dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        CompletionRequest,
        {"model": "lab/moon", "prompt": "Say it", "seed": 1},
    ),
    "chat": (
        "/v1/chat/completions",
        ChatRequest,
        {"model": "lab/moon", "messages": HELLO, "seed": 1},
    ),
    "responses": (
        "/v1/responses",
        ResponsesRequest,
        {"model": "lab/moon", "input": "Hi", "seed": 1},
    ),
    "messages": (
        "/v1/messages",
        MessagesRequest,
        {"model": "lab/moon", "messages": HELLO, "max_tokens": 40},
    ),
    "count_tokens": (
        "/v1/messages/count_tokens",
        CountTokensRequest,
        {"model": "lab/moon", "messages": HELLO},
    ),
    "tokenize": ("/tokenize", TokenizeRequest, {"messages": HELLO}),
    "detokenize": ("/detokenize", DetokenizeRequest, {"tokens": [70]}),
}
#: Names that the request classes of vLLM's server have, by route. tests/clients compares them
#: with vLLM's own classes.
VLLM_FIELDS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("vllm_fields.json").read_text()
)["routes"]

_HEADER = re.compile(r"^\| field \| ((?:\w+ \| )+)example \|", re.M)
_ROW = re.compile(r"^\| `(\w+)` \| ((?:(?:works|refused|label|–) \| )+)`(\{.*\})` \|")


class Case(NamedTuple):
    route: str
    field: str
    mark: str
    example: dict[str, Any]


def _cases(page: str) -> Iterator[Case]:
    routes: list[str] = []
    for line in page.splitlines():
        if header := _HEADER.match(line):
            routes = header[1].split(" | ")[:-1]
        elif row := _ROW.match(line):
            for route, mark in zip(routes, row[2].split(" | ")[:-1], strict=True):
                if mark != "–":
                    yield Case(route, row[1], mark, json.loads(row[3]))


CASES = list(_cases(PAGE.read_text()))


@pytest.mark.parametrize("route", ROUTES)
def test_the_page_lists_every_field_that_a_route_knows_once(route: str) -> None:
    listed = [case.field for case in CASES if case.route == route]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(ROUTES[route][1].model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_the_page_says_of_every_field_of_vllms_server_what_becomes_of_it(route: str) -> None:
    listed = {case.field for case in CASES if case.route == route}
    assert not set(VLLM_FIELDS[ROUTES[route][0]]) - listed


def test_routes_whose_requests_vllm_reads_are_all_here() -> None:
    assert set(VLLM_FIELDS) == {path for path, _, _ in ROUTES.values()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.route}-{case.field}")
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

    path, _, fine = ROUTES[case.route]

    async def outcome(body: dict[str, Any]) -> Any:
        specials.clear()
        answer = await client.post(path, json=body)
        text = _NAMES.sub("", answer.text)
        made = [_nameless(each, dice="seed" in fine) for each in gateway.requests]
        gateway.requests.clear()
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
