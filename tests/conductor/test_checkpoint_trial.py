"""A template or tokenizer that would stop the conductor is refused, or costs one chat."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import RequestTooCostly
from halfmoon_conductor.inputs.body_preparation import PreparationSpec
from halfmoon_conductor.inputs.body_preparers import PreparationBudget, ProcessPreparer
from halfmoon_conductor.inputs.checkpoint_trial import try_checkpoint
from halfmoon_conductor.inputs.preparation_messages import PreparationJob, PreparedBody
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_sandbox import Sandbox

MIB = 2**20
CARD = ModelCard(name="m", max_context=2**20, created=0)
#: What templates did to a server that rendered them in its own process.
HOSTILE = {
    "three loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999)"
    " %}{% endfor %}{% endfor %}{% endfor %}",
    "a list of gigabytes": "{% set x = [0] * 10**9 %}",
    "a huge power": "{% set x = (9 + messages|length) ** 30000000 %}{{ x % 7 }}",
    "doubling": "{% set ns = namespace(t='xxxxxxxx') %}{% for i in range(40) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
}
PLAIN = "{% for m in messages %}{{ m.content }} {% endfor %}"
#: Only one chat of two letters sets it off, which no sample text is.
TRAP = "{% if messages[0].content == 'hi' %}HOSTILE{% endif %}" + PLAIN


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(model_folder, copied)
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    return copied


@pytest.fixture
def preparer(folder: Path) -> Iterator[ProcessPreparer]:
    spec = msgspec.msgpack.encode(PreparationSpec(str(folder), "auto"))
    factory = "halfmoon_conductor.inputs.body_preparation:make_handler"
    sandbox = Sandbox(factory, spec, memory_bytes=256 * MIB, load_cpu_s=2.0)
    made = ProcessPreparer(sandbox, 2, PreparationBudget(base_s=0.5))
    yield made
    made.close()


def chat(text: str) -> PreparationJob:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return PreparationJob("ChatRequest", json.dumps(body).encode(), CARD)


async def test_an_ordinary_checkpoint_passes(folder: Path, preparer: ProcessPreparer) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)
    await try_checkpoint(preparer, "ours")
    assert isinstance(await preparer.prepare(chat("hi")), PreparedBody)


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_template_that_takes_all_time_or_memory_is_refused_by_name(
    folder: Path, preparer: ProcessPreparer, what: str
) -> None:
    (folder / "chat_template.jinja").write_text(HOSTILE[what] + PLAIN)
    with pytest.raises(TokenizerUnavailable, match=r"theirs .*(time|memory)"):
        await try_checkpoint(preparer, "theirs")


@pytest.mark.parametrize("what", HOSTILE)
async def test_one_that_waits_for_its_chat_costs_that_chat_alone(
    folder: Path, preparer: ProcessPreparer, what: str
) -> None:
    (folder / "chat_template.jinja").write_text(TRAP.replace("HOSTILE", HOSTILE[what]))
    await try_checkpoint(preparer, "theirs")
    with pytest.raises(RequestTooCostly):
        await preparer.prepare(chat("hi"))
    assert isinstance(await preparer.prepare(chat("hello")), PreparedBody)


async def test_a_tokenizer_whose_pattern_explodes_is_refused_by_name(
    folder: Path, preparer: ProcessPreparer
) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "((a|a|[a-z ,0-9])+)+[.]$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(TokenizerUnavailable, match=r"theirs .*(time|memory)"):
        await try_checkpoint(preparer, "theirs")
