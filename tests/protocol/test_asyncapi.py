"""The AsyncAPI document: complete, as the tables say, and valid for AsyncAPI's own tools."""

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from halfmoon_protocol import schema
from halfmoon_protocol.messages import (
    ALL_MESSAGES,
    ToConductor,
    ToDecode,
    ToFirstStage,
    ToFurtherStage,
    ToKvstore,
    ToKvstoreClient,
    ToPrefill,
)
from halfmoon_protocol.schema.ports import COMMAND_PORTS, EVENT_PORTS
from tests.installed_programs import skip_without

DOCUMENT = json.loads(schema.artefacts()["schema/asyncapi.json"])
ROOT = schema.HOME.parents[1]
PARSER = Path(__file__).with_name("asyncapi_parser")
#: Of the diagnostics, which tell of nothing that is wrong: we write what most tools read.
ALLOWED = {"asyncapi-latest-version"}
_INSTALL_S, _PARSE_S = 240, 120


RECEIVERS: tuple[Any, ...] = (
    ToConductor, ToPrefill, ToFurtherStage, ToFirstStage, ToDecode, ToKvstore, ToKvstoreClient
)  # fmt: skip


def test_every_message_has_a_receiver_and_a_port() -> None:
    commands = {each for port in COMMAND_PORTS for each in (*port.taken, *port.sent)}
    assert commands | {port.load for port in EVENT_PORTS} == set(ALL_MESSAGES)
    received = {message for union in RECEIVERS for message in union.__args__}
    assert received == set(ALL_MESSAGES), "no role gets what the codec does not read"
    for answer in ToKvstoreClient.__args__:
        assert "ticket" in answer.__struct_fields__, "its question had one"


def test_a_port_answers_only_what_it_takes() -> None:
    for port in COMMAND_PORTS:
        assert set(port.answers) <= set(port.taken), port.name


def documented_answers() -> dict[str, set[str]]:
    """Tags of messages, and of those that answer them, from the tables of docs/protocol.md."""
    text = (ROOT / "docs" / "protocol.md").read_text().partition("### What a message may cost")[0]
    tags = {str(each.__struct_config__.tag) for each in ALL_MESSAGES}
    rows = re.findall(r"^\| `([a-z_]+)` \| [^|]*\|([^|]*)\|", text, re.MULTILINE)
    return {tag: set(re.findall(r"`([a-z_]+)`", answers)) & tags for tag, answers in rows}


def test_answers_are_those_of_the_documents_tables() -> None:
    answers: dict[str, set[str]] = {}
    for port in COMMAND_PORTS:
        for command in port.taken:
            tags = {str(each.__struct_config__.tag) for each in port.answers.get(command, ())}
            answers.setdefault(str(command.__struct_config__.tag), set()).update(tags)
    documented = documented_answers()
    assert {tag: documented[tag] for tag in answers} == answers


@pytest.fixture(scope="module")
def parser() -> Path:
    """A folder with AsyncAPI's parser, installed with the first test."""
    skip_without("npm", "node")  # AsyncAPI's parser is a package of npm
    lock = (PARSER / "package-lock.json").read_bytes()
    folder = ROOT / ".halfmoon" / f"asyncapi-parser-{hashlib.sha256(lock).hexdigest()[:12]}"
    if not folder.exists():
        # Another process of tests may do the same: the first one to finish gives it its name.
        folder.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="asyncapi-parser-"))
        for file in PARSER.iterdir():
            shutil.copy(file, made)
        done = subprocess.run(
            ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=made,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
        )
        if done.returncode:
            pytest.skip(f"npm can't install AsyncAPI's parser: {done.stderr[-500:]}")
        try:
            made.rename(folder)
        except OSError:
            shutil.rmtree(made)
    return folder


def test_the_parser_of_asyncapi_finds_nothing_wrong(parser: Path) -> None:
    command = ["node", "diagnostics.mjs", str(schema.HOME / "schema" / "asyncapi.json")]
    done = subprocess.run(command, cwd=parser, capture_output=True, text=True, timeout=_PARSE_S)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert [each for each in result["diagnostics"] if each["code"] not in ALLOWED] == []
    assert set(result["operations"]) == set(DOCUMENT["operations"])
