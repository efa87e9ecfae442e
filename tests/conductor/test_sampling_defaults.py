"""What a model's makers recommend holds where a request says nothing, in every API."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from halfmoon_conductor.inputs.sampling_defaults import NO_DEFAULTS, read_sampling_defaults
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Front, open_front

Write = Callable[[Any], str]
OpenModel = Callable[[dict[str, Any]], AbstractAsyncContextManager[Front]]
STATED = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5}
NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(config: Any) -> str:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "generation_config.json").write_text(text)
        return str(tmp_path)

    return write


@pytest.fixture
def open_model(gateway: ScriptedGateway, tokenizer: HubTokenizer, write: Write) -> OpenModel:
    """Open a client of a model with a generation config."""

    def opened(config: dict[str, Any]) -> AbstractAsyncContextManager[Front]:
        defaults = read_sampling_defaults(write(config), "auto")
        return open_front(gateway, tokenizer, sampling_defaults=defaults)

    return opened


def drawn(front: Front) -> dict[str, Any]:
    return {name: getattr(front.last.sampling, name) for name in STATED}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
async def test_a_request_that_says_nothing_is_sampled_as_the_models_makers_say(
    open_model: OpenModel, path: str
) -> None:
    async with open_model(STATED) as front:
        for left_out in ({}, {"temperature": None}):
            await front.ask(path, left_out)
            assert drawn(front) == STATED
        answer = await front.ask(path, temperature=0)
        assert front.last.sampling.temperature == 0
        if path == RESPONSES:
            assert (answer["temperature"], answer["top_p"]) == (0, 0.5)


async def test_a_request_overrides_each_default_even_with_a_value_that_asks_for_nothing(
    open_model: OpenModel,
) -> None:
    async with open_model(STATED) as front:
        for name, value in NEUTRAL.items():
            await front.ask(COMPLETIONS, {name: value})
            assert drawn(front) == {**STATED, name: value}


async def test_the_list_of_models_shows_what_holds(open_model: OpenModel) -> None:
    for config, shown in ((STATED, STATED), ({"eos_token_id": 0}, {})):
        async with open_model(config) as front:
            (model,) = (await front.get("/v1/models")).json()["data"]
            assert model["default_sampling_params"] == shown
            assert (await front.get("/v1/models/lab/moon")).json() == model


async def test_no_sampling_is_greedy_as_in_transformers(open_model: OpenModel) -> None:
    async with open_model({"do_sample": False, "temperature": 0.7}) as front:
        await front.ask(COMPLETIONS)
        assert front.last.sampling.temperature == 0


async def test_the_models_limit_is_that_of_conversations_that_name_none(
    open_model: OpenModel,
) -> None:
    async with open_model({"max_new_tokens": 3}) as front:
        for path, more, limit in (
            (COMPLETIONS, {}, 16), (CHAT, {}, 3), (RESPONSES, {}, 3), (CHAT, {"max_tokens": 9}, 9),
        ):  # fmt: skip
            await front.ask(path, more)
            assert front.last.stopping.max_new_tokens == limit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_p", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("-inf")),
        ("max_new_tokens", 0),
        ("max_new_tokens", "9" * 100_000),
    ],
)
def test_a_default_that_no_request_may_have_is_refused_by_name(
    write: Write, name: str, value: Any
) -> None:
    folder = write({name: value})
    with pytest.raises(TokenizerUnavailable) as caught:
        read_sampling_defaults(folder, "auto")
    said = str(caught.value)
    assert f"{name} is" in said and "--generation-config none" in said
    assert len(said) < 600
    assert read_sampling_defaults(folder, "none") is NO_DEFAULTS


@pytest.mark.parametrize("content", ["[1]", "{", '{"temperature": ' + "[" * 10_000, "\x00"])
def test_a_damaged_file_is_refused_by_name(write: Write, content: str) -> None:
    with pytest.raises(TokenizerUnavailable, match="generation_config"):
        read_sampling_defaults(write(content), "auto")


@pytest.mark.parametrize("source", ["fake://tiny", ""])
def test_a_model_without_the_file_has_no_defaults(tmp_path: Path, source: str) -> None:
    assert read_sampling_defaults(source or str(tmp_path), "auto").stated == {}
