"""Define the kinds of request fields, and how each reports an invalid value.

A field is *supported*, *neutral* or unknown. A neutral field is known: values that ask for nothing
are accepted, and any other is refused by name. Unknown fields are refused. So no field is ignored
silently. The constraints written here appear in ``/openapi.json``.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from halfmoon_conductor.api.template_switches import check_template_variables
from halfmoon_protocol.sampling import MAX_LOGIT_BIAS

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOKEN_ID = 2**32 - 1
MAX_LOGIT_BIASES = 1024
#: Messages of a conversation.
MAX_MESSAGES = 4096
#: Messages in the other APIs, whose conversations become chats with an additional system message.
MAX_TURNS = MAX_MESSAGES - 1
#: Documents that a model may answer from.
MAX_DOCUMENTS = 1024
#: Parts of one message's content.
MAX_PARTS = 1024
#: Client's variables for a chat template.
MAX_VARIABLES = 64
#: Answers to one request: its prompts times `n`.
MAX_CHOICES = 128


#: A token id as the key of an object.
_DIGITS = re.compile("[0-9]{1,9}")


class IgnoredValues:
    """Mark a known field that accepts only values without effect: none, null, or one of these."""

    def __init__(self, *values: Any) -> None:
        self._allowed = (None, *values)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Accept any value, then check it."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the accepted values."""
        return {"enum": list(self._allowed)}

    def _check(self, value: Any) -> Any:
        if any(type(value) is type(each) and value == each for each in self._allowed):
            return value
        ways_out = " or ".join(json.dumps(each) for each in self._allowed[1:] or [None])
        raise PydanticCustomError(
            "not_supported",
            "is not supported yet; leave it out or send {value}",
            {"value": ways_out},
        )


def form_discriminator(message: str, kind: Callable[[Any], str | None]) -> Discriminator:
    """Return a discriminator of a field's forms, so that errors describe the form that was sent."""
    return Discriminator(kind, custom_error_type="wrong_type", custom_error_message=message)


def text_or_list_form(value: Any) -> str | None:
    """Return the form of a field that is one text or several parts."""
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list | tuple) else None


def _prompt_form(value: Any) -> str | None:
    match value:
        case str():
            return "text"
        case [str(), *_]:
            return "texts"
        case [list(), *_]:
            return "token lists"
        case [*_]:
            return "tokens"
    return None


def _unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can write and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "not_unicode", "has half of a surrogate pair in it, which is no character"
        ) from None
    return text


def _token_id_keys(biases: dict[str, float]) -> dict[str, float]:
    for key in biases:
        if not _DIGITS.fullmatch(key):
            raise PydanticCustomError(
                "not_a_token_id", 'has a key that is no token id; keys are such as "50256"'
            )
    return biases


Text = Annotated[str, AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Variables = Annotated[
    dict[str, JsonValue],
    Field(max_length=MAX_VARIABLES),
    AfterValidator(check_template_variables),
]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Several = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
LogitBias = Annotated[
    dict[
        Annotated[str, Field(max_length=20)],
        Annotated[
            float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, strict=True, allow_inf_nan=False)
        ],
    ],
    Field(
        max_length=MAX_LOGIT_BIASES,
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    ),
    AfterValidator(_token_id_keys),
]
Parts = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
Salt = Annotated[str, Field(max_length=1024), AfterValidator(_unicode)]
StopString = Annotated[
    str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS), AfterValidator(_unicode)
]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag("list")],
    form_discriminator("must be a string or a list of strings", text_or_list_form),
]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[Text], Several, Tag("texts")]
    | Annotated[list[TokenIds], Several, Tag("token lists")],
    form_discriminator("must be a string or a list of token ids, or a list of these", _prompt_form),
]


class ApiModel(BaseModel):
    """Base of all request objects: exact types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        return reject_unknown_fields(cls, body)


def reject_unknown_fields(model: type[BaseModel], body: Any) -> Any:
    """Raise one error for the first unknown field, where pydantic would raise one for each."""
    if isinstance(body, dict):
        known = _known_fields(model)
        for name in body:
            if name not in known:
                # A name with half of a surrogate pair can't be encoded.
                shown_name = name.encode(errors="replace").decode()
                raise PydanticCustomError("unknown_field", "{field}", {"field": shown_name})
    return body


@cache
def _known_fields(model: type[BaseModel]) -> frozenset[str]:
    """Return the fields of a model by the names that clients use."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())
