"""Frames: what is sent is what is read, and what is not ours is refused."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol import codec, schema
from halfmoon_protocol.errors import (
    MalformedMessage,
    MessageTooLarge,
    ProtocolError,
    UnknownVersion,
)
from halfmoon_protocol.examples import EXAMPLES
from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.messages import ALL_MESSAGES, Cancel, Hello, Message

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


CANCEL = Cancel(request_id=RequestId("r"))


def test_unknown_fields_are_ignored() -> None:
    frame = codec.encode(CANCEL)
    fields = msgspec.msgpack.decode(frame[1:]) | {"of_a_later_version": [1, 2]}
    assert codec.decode(frame[:1] + msgspec.msgpack.encode(fields)) == CANCEL


def test_a_frame_of_another_version_names_both_versions() -> None:
    with pytest.raises(UnknownVersion, match="version 9, this build speaks 1"):
        codec.decode(b"\x09" + codec.encode(CANCEL)[1:])


def test_a_frame_over_the_limit_is_not_even_parsed() -> None:
    with pytest.raises(MessageTooLarge, match="11 bytes is over 10"):
        codec.decode(bytes(11), max_bytes=10)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode({"type": "hello", "conductor_id": 3, "session": 1}),
        msgspec.msgpack.encode([1, 2]),
        codec.encode(Hello(conductor_id=ConductorId("c"), session=1))[1:] + b"\x00",
        b"\x91" * 5000,
    ],
)
def test_what_is_not_a_message_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        codec.decode(bytes([codec.VERSION]) + body)


@given(st.binary(max_size=200))
def test_garbage_raises_a_protocol_error_or_is_a_message(data: bytes) -> None:
    try:
        message = codec.decode(data)
    except ProtocolError:
        return
    assert isinstance(message, Message)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_cut_frame_is_malformed(message: Message, data: st.DataObject) -> None:
    frame = codec.encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ProtocolError):
        codec.decode(frame[:cut])
