"""Prepare a body: parse, check, render and tokenize it.

All work that a request can make expensive is here, in plain functions of its bytes. It runs in
child processes (`body_preparers`), which load `make_handler`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from pydantic import TypeAdapter

from halfmoon_conductor.api.anthropic.anthropic_objects import TokenCount
from halfmoon_conductor.api.anthropic.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.api.tokenize_models import DetokenizeRequest, TokenizeRequest
from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.errors import ApiError, InvalidRequest
from halfmoon_conductor.inputs import body_parsing
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
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder
from halfmoon_conductor.inputs.tokenize_bodies import detokenize_body, tokenize_body
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_conductor.text.tokenizer_loader import open_tokenizer

#: Most bytes and values of a body besides its conversation, such as tools, schemas and labels. The
#: event loop that serves all streams parses them a second time.
MAX_OTHER_BYTES = 512 * 1024
MAX_OTHER_VALUES = 20_000
#: Most objects of a whole body: messages, parts, tools and schemas.
MAX_OBJECTS = 20_000

_MODELS: Mapping[str, type] = {
    model.__name__: model
    for model in (
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
    """Prepare bodies for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: ToolCallFormat | Literal["auto"],
        aliases: Sequence[str] = (),
    ) -> None:
        self._card: ModelCard | None = None
        self._encoder = PromptEncoder(lambda: self._card, tokenizer, parser, aliases)
        self._models: dict[str, TypeAdapter[Any]] = {
            name: TypeAdapter(model) for name, model in _MODELS.items()
        }

    def outcome(self, job: PreparationJob) -> PreparationOutcome:
        """Prepare a body, or return the error in it."""
        self._card = job.card
        try:
            value = body_parsing.parse_json(job.content)
            if _exceeds(value, MAX_OBJECTS, of=(dict,)):
                raise InvalidRequest(
                    f"The body has over {MAX_OBJECTS} objects (messages, parts, tools and all in "
                    "them), the most that are accepted."
                )
            return self._prepared(
                body_parsing.validate_body(self._models[job.model_name], value), value
            )
        except ApiError as error:
            return PreparationRefused.of(error)

    def _prepared(self, body: Any, value: dict[str, Any]) -> PreparationOutcome:
        encoder = self._encoder
        match body:
            case CompletionRequest():
                prompts = encoder.encode_prompts(body)
                fields = _replace_fields(value, {"prompt": [""] * len(prompts)})
                return PreparedBody(
                    fields, tuple(map(pack_token_ids, prompts)), encoder.echoed_prompts(body)
                )
            case ChatRequest():
                return self._chat(body, _replace_fields(value, {**_NO_TURN, "documents": None}))
            case ResponsesRequest():
                kept = {} if body.instructions is None else {"instructions": body.instructions}
                return self._chat(body.as_chat(), _replace_fields(value, {"input": ""}, kept))
            case MessagesRequest():
                return self._chat(
                    body.as_chat(), _replace_fields(value, {**_NO_TURN, "system": None})
                )
            case CountTokensRequest():
                encoder.model_card(body.model)
                n_tokens = len(encoder.encode_conversation(body.as_chat()))
                return PreparedAnswer(TokenCount(input_tokens=n_tokens).model_dump_json().encode())
            case TokenizeRequest():
                return PreparedAnswer(tokenize_body(encoder, body).model_dump_json().encode())
            case DetokenizeRequest():
                return PreparedAnswer(detokenize_body(encoder, body).model_dump_json().encode())
        raise TypeError(f"nothing is known of {type(body).__name__}")

    def _chat(self, chat: ChatRequest, fields: bytes) -> PreparedBody:
        return PreparedBody(fields, (pack_token_ids(self._encoder.encode_chat(chat)),))


def _replace_fields(
    value: dict[str, Any], replaced: Mapping[str, Any], kept: Mapping[str, Any] | None = None
) -> bytes:
    """Return a body as JSON with some fields replaced.

    Args:
        value: the parsed body.
        replaced: fields that became tokens, with their replacements.
        kept: fields that keep any length, since the answer repeats them.

    Raises:
        InvalidRequest: the other fields have too many values or bytes, or half a character.
    """
    kept = kept or {}
    rest = {name: each for name, each in value.items() if name not in (*replaced, *kept)}
    try:
        content = msgspec.json.encode(rest)
    except UnicodeEncodeError as error:
        name = next(name for name, each in rest.items() if not _is_unicode(each))
        raise InvalidRequest(f"{name} is not Unicode text: {error.reason}", param=name) from None
    if len(content) > MAX_OTHER_BYTES or _exceeds(rest, MAX_OTHER_VALUES, of=(object,)):
        largest = max(rest, key=lambda name: len(msgspec.json.encode(rest[name])))
        raise InvalidRequest(
            f"The fields besides {next(iter(replaced))} are over the {MAX_OTHER_BYTES} bytes and "
            f"{MAX_OTHER_VALUES} values that they may have in all; the largest is {largest}.",
            param=largest,
        )
    return msgspec.json.encode({**rest, **replaced, **kept})


def _is_unicode(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        return False
    return True


def _exceeds(value: Any, most: int, *, of: tuple[type, ...]) -> bool:
    """Return whether a value, itself included, contains more than `most` values of these types."""
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
    """The model that a child process prepares bodies for."""

    tokenizer: str
    tool_call_parser: ToolCallFormat | Literal["auto"]
    #: Other names of the model, as of `PromptEncoder`.
    aliases: tuple[str, ...] = ()


def make_handler(argument: bytes) -> Callable[[bytes], bytes]:
    """Load the tokenizer of a `PreparationSpec` in MessagePack; see `halfmoon_sandbox`."""
    spec = msgspec.msgpack.decode(argument, type=PreparationSpec)
    tokenizer = open_tokenizer(spec.tokenizer)
    preparation = BodyPreparation(tokenizer, spec.tool_call_parser, spec.aliases)
    return lambda request: encode_outcome(preparation.outcome(decode_job(request)))
