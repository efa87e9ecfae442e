"""Reads a large body to its end: parses, checks, renders and tokenises it.

All that a request can make expensive is here, in plain functions of its bytes. It runs in helper
processes (`helpers`): `make_handler` is what these load.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import msgspec
from pydantic import TypeAdapter

from halfmoon_conductor import request_body
from halfmoon_conductor.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.anthropic_shapes import TokenCount
from halfmoon_conductor.errors import ApiError, InvalidRequest
from halfmoon_conductor.generation import Gateway, ModelCard
from halfmoon_conductor.intake import Intake
from halfmoon_conductor.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.prepared import (
    FinalAnswer,
    Job,
    Outcome,
    Prepared,
    Refused,
    decode_job,
    encode_outcome,
    packed,
)
from halfmoon_conductor.responses_requests import ResponsesRequest
from halfmoon_conductor.tokenizer import Tokenizer, open_tokenizer
from halfmoon_conductor.tokenizing import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenized,
    tokenized,
)
from halfmoon_conductor.tool_calls import Parser

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


class Preparation:
    """For one model."""

    def __init__(self, tokenizer: Tokenizer, parser: Parser | Literal["auto"]) -> None:
        self._model = _Model()
        self._intake = Intake(cast(Gateway, self._model), tokenizer, parser)
        self._shapes: dict[str, TypeAdapter[Any]] = {
            name: TypeAdapter(shape) for name, shape in _SHAPES.items()
        }

    def outcome(self, job: Job) -> Outcome:
        """Read a body."""
        self._model.model = job.card
        try:
            value = request_body.parsed(job.content)
            if _exceeds(value, MAX_OBJECTS, of=(dict,)):
                raise InvalidRequest(
                    f"The body has over {MAX_OBJECTS} objects (messages, parts, tools and all in "
                    "them), the most that are accepted."
                )
            return self._prepared(request_body.checked(self._shapes[job.shape], value), value)
        except ApiError as error:
            return Refused.of(error)

    def _prepared(self, body: Any, value: dict[str, Any]) -> Outcome:
        intake = self._intake
        match body:
            case CompletionRequest():
                prompts = intake.prompts_of(body)
                fields = _light(value, {"prompt": [""] * len(prompts)})
                return Prepared(fields, tuple(map(packed, prompts)), intake.echoes_of(body))
            case ChatRequest():
                return self._chat(body, _light(value, _NO_TURN))
            case ResponsesRequest():
                told = {} if body.instructions is None else {"instructions": body.instructions}
                return self._chat(body.as_chat(), _light(value, {"input": ""}, told))
            case MessagesRequest():
                return self._chat(body.as_chat(), _light(value, {**_NO_TURN, "system": None}))
            case CountTokensRequest():
                n_tokens = len(intake.conversation(body.as_chat()))
                return FinalAnswer(TokenCount(input_tokens=n_tokens).model_dump_json().encode())
            case TokenizeRequest():
                return FinalAnswer(tokenized(intake, body).model_dump_json().encode())
            case DetokenizeRequest():
                return FinalAnswer(detokenized(intake, body).model_dump_json().encode())
        raise TypeError(f"nothing is known of {type(body).__name__}")

    def _chat(self, chat: ChatRequest, fields: bytes) -> Prepared:
        return Prepared(fields, (packed(self._intake.checked_conversation(chat)),))


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


class Spec(msgspec.Struct, frozen=True):
    """Which model a helper is for."""

    tokenizer: str
    tool_call_parser: Parser | Literal["auto"]


def make_handler(argument: bytes) -> Callable[[bytes], bytes]:
    """Load the tokenizer of a `Spec` in MessagePack; see `halfmoon_sandbox`."""
    spec = msgspec.msgpack.decode(argument, type=Spec)
    preparation = Preparation(open_tokenizer(spec.tokenizer), spec.tool_call_parser)
    return lambda request: encode_outcome(preparation.outcome(decode_job(request)))
