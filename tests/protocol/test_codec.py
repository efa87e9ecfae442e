"""Frames: what is sent is what is read, and what is not ours is refused."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from halfmoon_protocol import codec, schema
from halfmoon_protocol.examples import EXAMPLES
from halfmoon_protocol.messages import ALL_MESSAGES

GOLDEN = schema.HOME / "golden"


def test_every_message_has_an_example_that_survives_the_wire() -> None:
    assert {type(example) for example in EXAMPLES} == set(ALL_MESSAGES)
    for message in EXAMPLES:
        assert codec.decode(codec.encode(message)) == message


def test_golden_frames_are_what_we_write_and_read() -> None:
    for golden in json.loads((GOLDEN / "messages.json").read_text()):
        frame = bytes.fromhex(golden["frame_hex"])
        message = codec.decode(frame)
        assert codec.encode(message) == frame
        assert json.loads(msgspec.json.encode(message)) == golden["json"]


def integers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from integers(item)
    elif isinstance(value, int):
        yield value


def test_golden_json_has_no_integer_that_javascript_would_round() -> None:
    for file in GOLDEN.glob("*.json"):
        assert max(integers(json.loads(file.read_text())), default=0) < 2**53, file.name


@pytest.mark.parametrize("golden", json.loads((GOLDEN / "largest_integers.json").read_text()))
def test_the_largest_integers_are_golden_in_hexadecimal(golden: dict[str, Any]) -> None:
    frame = bytes.fromhex(golden["frame_hex"])
    message = codec.decode(frame)
    assert codec.encode(message) == frame
    assert golden["integers_hex"]
    for pointer, value in golden["integers_hex"].items():
        found = msgspec.to_builtins(message)
        for step in pointer.strip("/").split("/"):
            found = found[int(step) if isinstance(found, list | tuple) else step]
        assert found == int(value, 16) >= 2**53


def test_the_generated_schema_accepts_every_example_and_no_unknown_type() -> None:
    validator = jsonschema.Draft202012Validator(
        json.loads(schema.artefacts()["schema/messages.json"])
    )
    for message in EXAMPLES:
        validator.validate(json.loads(msgspec.json.encode(message)))
    assert not validator.is_valid({"type": "no_such_message"})


def test_schema_and_golden_bytes_are_current() -> None:
    assert schema.main(["--check"]) == 0
