"""Reads a large body to its end: parses, checks, renders and tokenises it.

All that a request can make expensive is here, in plain functions of its bytes. It runs in helper
processes (`helpers`): `make_handler` is what these load.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import msgspec
from pydantic import TypeAdapter

from halfmoon_conductor.api.anthropic.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.api.anthropic.anthropic_serializer import TokenCount
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.api.tokenize_models import DetokenizeRequest, TokenizeRequest
from halfmoon_conductor.engine_io.gateway_interface import Gateway, ModelCard
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.errors import ApiError, InvalidRequest
from halfmoon_conductor.inputs import body_parsing
from halfmoon_conductor.inputs.input_processor import InputProcessor
from halfmoon_conductor.inputs.preparation_messages import (
    PreparationJob,
    PreparationOutcome,
    PreparationRefused,
    PreparedAnswer,
    PreparedBody,
    decode_job,
    encode_outcome,
    pack_token_ids,
)
from halfmoon_conductor.inputs.tokenize_bodies import detokenize_body, tokenize_body
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_conductor.text.tokenizer_loader import open_tokenizer

#: What a body may have besides its conversation: tools, schemas, labels. It is read a second
#: time, where streams wait for it.
MAX_OTHER_BYTES = 512 * 1024
MAX_OTHER_VALUES = 20_000
#: Of all of a body: messages, parts, tools and schemas.
MAX_OBJECTS = 20_000

_SHAPES: Mapping[str, type] = {
    shape.__name__: shape
    for shape in (
        CompletionRequest,
        ChatRequest,
        ResponsesRequest,
        MessagesRequest,
        CountTokensRequest,
        TokenizeRequest,
        DetokenizeRequest,
    )
}
_NO_TURN = {"messages": [{"role": "user", "content": ""}]}


class BodyPreparation:
    """For one model."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolCallFormat | Literal["auto"]) -> None:
        self._model = _Model()
        self._intake = InputProcessor(cast(Gateway, self._model), tokenizer, parser)
        self._shapes: dict[str, TypeAdapter[Any]] = {
            name: TypeAdapter(shape) for name, shape in _SHAPES.items()
        }

    def outcome(self, job: PreparationJob) -> PreparationOutcome:
        """Read a body."""
        self._model.model = job.card
        try:
            value = body_parsing.parse_json(job.content)
            if _exceeds(value, MAX_OBJECTS, of=(dict,)):
                raise InvalidRequest(
                    f"The body has over {MAX_OBJECTS} objects (messages, parts, tools and all in "
                    "them), the most that are accepted."
                )
            return self._prepared(body_parsing.validate_body(self._shapes[job.shape], value), value)
        except ApiError as error:
            return PreparationRefused.of(error)

    def _prepared(self, body: Any, value: dict[str, Any]) -> PreparationOutcome:
        intake = self._intake
        match body:
            case CompletionRequest():
                prompts = intake.prompts_of(body)
                fields = _light(value, {"prompt": [""] * len(prompts)})
                return PreparedBody(
                    fields, tuple(map(pack_token_ids, prompts)), intake.echoes_of(body)
                )
            case ChatRequest():
                return self._chat(body, _light(value, _NO_TURN))
            case ResponsesRequest():
                told = {} if body.instructions is None else {"instructions": body.instructions}
                return self._chat(body.as_chat(), _light(value, {"input": ""}, told))
            case MessagesRequest():
                return self._chat(body.as_chat(), _light(value, {**_NO_TURN, "system": None}))
            case CountTokensRequest():
                n_tokens = len(intake.conversation(body.as_chat()))
                return PreparedAnswer(TokenCount(input_tokens=n_tokens).model_dump_json().encode())
            case TokenizeRequest():
                return PreparedAnswer(tokenize_body(intake, body).model_dump_json().encode())
            case DetokenizeRequest():
                return PreparedAnswer(detokenize_body(intake, body).model_dump_json().encode())
        raise TypeError(f"nothing is known of {type(body).__name__}")

    def _chat(self, chat: ChatRequest, fields: bytes) -> PreparedBody:
        return PreparedBody(fields, (pack_token_ids(self._intake.checked_conversation(chat)),))


class _Model:
    """All that the intake asks of a gateway."""

    model: ModelCard | None = None


def _light(
    value: dict[str, Any], instead: Mapping[str, Any], told: Mapping[str, Any] | None = None
) -> bytes:
    """A body with these fields instead of its own.

    Args:
        value: the body.
        instead: fields that became tokens.
        told: fields that stay as long as they are, since the answer says them again.

    Raises:
        InvalidRequest: the other fields are too many, or too long.
    """
    told = told or {}
    rest = {name: each for name, each in value.items() if name not in (*instead, *told)}
    content = msgspec.json.encode(rest)
    if len(content) > MAX_OTHER_BYTES or _exceeds(rest, MAX_OTHER_VALUES, of=(object,)):
        largest = max(rest, key=lambda name: len(msgspec.json.encode(rest[name])))
        raise InvalidRequest(
            f"The fields besides {next(iter(instead))} are over the {MAX_OTHER_BYTES} bytes and "
            f"{MAX_OTHER_VALUES} values that they may have in all; the largest is {largest}.",
            param=largest,
        )
    return msgspec.json.encode({**rest, **instead, **told})


def _exceeds(value: Any, most: int, *, of: tuple[type, ...]) -> bool:
    """Whether there are more values of these types in a value, itself included."""
    n, rest = 0, [value]
    while rest:
        each = rest.pop()
        n += isinstance(each, of)
        if n > most:
            return True
        if isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, list):
            rest += each
    return False


class PreparationSpec(msgspec.Struct, frozen=True):
    """Which model a helper is for."""

    tokenizer: str
    tool_call_parser: ToolCallFormat | Literal["auto"]


def make_handler(argument: bytes) -> Callable[[bytes], bytes]:
    """Load the tokenizer of a `PreparationSpec` in MessagePack; see `halfmoon_sandbox`."""
    spec = msgspec.msgpack.decode(argument, type=PreparationSpec)
    preparation = BodyPreparation(open_tokenizer(spec.tokenizer), spec.tool_call_parser)
    return lambda request: encode_outcome(preparation.outcome(decode_job(request)))
