"""Fields that change no answer are taken with any well-formed value, and are bounded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, COMPLETIONS, RESPONSES, Front, open_front

PATHS = (COMPLETIONS, CHAT, RESPONSES)
LABELS = ["user", "safety_identifier", "prompt_cache_key", "session_id", "chat_id"]
WORDS = ["prompt_cache_retention", "service_tier"]


@pytest.mark.parametrize("path", PATHS)
async def test_any_well_formed_value_is_taken(front: Front, path: str) -> None:
    taken: dict[str, list[Any]] = {
        "metadata": [{f"{i:064}": "x" * 512 for i in range(16)}, {}],
        "store": [True, False],
        "service_tier": ["auto", "default", "flex", "scale", "priority", "半" * 64],
        "prompt_cache_retention": ["in_memory", "in-memory", "24h", "半" * 64],
        "prompt_cache_options": [{"mode": "implicit", "ttl": "1h"}],
        **{name: ["x" * 1024] for name in LABELS},
    }
    for name, values in taken.items():
        for value in values:
            await front.ask(path, {name: value})


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_malformed_or_too_long_is_refused_by_name(front: Front, path: str) -> None:
    refused: dict[str, list[Any]] = {
        "metadata": [
            {str(i): "x" for i in range(17)}, {"x" * 65: "x"}, {"a": "x" * 513}, {"a": 1},
            {"a": None}, ["a"], {"\ud800": "x"},
        ],
        "store": ["yes", 1],
        "prompt_cache_options": [{"mode": {"deep": []}}],
        **{name: ["x" * 1025, ["x"], "\ud800"] for name in LABELS},
        **{name: ["x" * 65, ["x"], "\ud800", 1] for name in WORDS},
    }  # fmt: skip
    for name, values in refused.items():
        for value in values:
            error = await front.refused(path, {name: value})
            assert error["param"].split(".")[0] == name


PREDICTION = {"type": "content", "content": "Yes"}


@pytest.mark.parametrize(
    ("path", "fields", "taken"),
    [
        (CHAT, {"prediction": PREDICTION}, True),
        (CHAT, {"prediction": PREDICTION | {"content": [{"type": "text", "text": "Yes"}]}}, True),
        (CHAT, {"prediction": PREDICTION | {"type": "other"}}, False),
        (CHAT, {"prediction": {}}, False),
        (CHAT, {"reasoning_effort": "xhigh", "verbosity": "high"}, True),
        (CHAT, {"reasoning_effort": 3}, False),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": False}}, True),
        (COMPLETIONS, {"stream": True, "stream_options": {"include_obfuscation": True}}, True),
        (RESPONSES, {"stream_options": {"include_obfuscation": False}}, True),
        (RESPONSES, {"stream_options": {"include_obfuscation": 3}}, False),
        (RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}, True),
        (RESPONSES, {"reasoning": {"effort": ["high"]}}, False),
        (RESPONSES, {"text": {"verbosity": "low"}}, True),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, True),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, False),
    ],
)
async def test_what_one_route_has_is_checked_there(
    front: Front, path: str, fields: dict[str, Any], taken: bool
) -> None:
    answer = await front.post(path, fields)
    assert answer.status_code == (200 if taken else 400), answer.text


async def test_a_response_repeats_its_labels_and_says_what_was_done(front: Front) -> None:
    labels = {
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "user": "u",
        "reasoning": {"effort": "low", "summary": None},
    }
    answer = await front.ask(RESPONSES, labels, service_tier="flex", store=True)
    done = {"service_tier": "default", "store": True, "background": False}
    assert {name: answer[name] for name in labels | done} == labels | done


EFFORT = "{% for message in messages %}{{ message.content }}{% endfor %}[{{ reasoning_effort }}]"
SWITCH = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}[quick]{% endif %}"
)


def with_template(template: str, model: Path, folder: Path) -> HubTokenizer:
    """The model with another chat template."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    changed = json.dumps({**config, "chat_template": template})
    (folder / "tokenizer_config.json").write_text(changed)
    return HubTokenizer(folder)


@pytest.fixture
def prompt_of(gateway: ScriptedGateway, model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """The prompt that a request with these fields has, by a template."""

    async def ask(template: str, path: str, **fields: Any) -> str:
        tokenizer = with_template(template, model_folder, tmp_path)
        async with open_front(gateway, tokenizer) as front:
            await front.ask(path, fields)
            return front.prompt()

    return ask


@pytest.mark.parametrize(
    ("template", "effort", "variables", "prompt"),
    [
        (EFFORT, "low", {}, "Hi[low]"),
        (EFFORT, None, {}, "Hi[]"),
        (EFFORT, "low", {"reasoning_effort": "high"}, "Hi[high]"),
        (SWITCH, "none", {}, "Hi[quick]"),
        (SWITCH, "low", {}, "Hi"),
        (SWITCH, "none", {"enable_thinking": True}, "Hi"),
    ],
)
async def test_a_template_with_a_switch_for_the_effort_is_told_of_it(
    prompt_of: Callable[..., Any],
    template: str,
    effort: str | None,
    variables: dict[str, Any],
    prompt: str,
) -> None:
    more = {"chat_template_kwargs": variables} if variables else {}
    for path, field in ((CHAT, {"reasoning_effort": effort}), (RESPONSES, {"effort": effort})):
        given = field if path == CHAT else {"reasoning": field}
        assert await prompt_of(template, path, **more, **(given if effort else {})) == prompt


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"enable_thinking": False}, "Hi[quick]"),
        ({"enable_thinking": True}, "Hi"),
        ({"enable_thinking": None}, "Hi"),
        ({"enable_thinking": False, "chat_template_kwargs": {"mood": "calm"}}, "Hi[quick]"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "Hi"),
    ],
)
async def test_the_switch_for_thoughts_is_taken_at_the_top_of_a_body_too(
    prompt_of: Callable[..., Any], fields: dict[str, Any], prompt: str
) -> None:
    assert await prompt_of(SWITCH, CHAT, **fields) == prompt
