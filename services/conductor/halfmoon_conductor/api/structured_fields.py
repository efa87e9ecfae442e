"""Fields that ask for an answer of a given form: OpenAI's `response_format`, and vLLM's."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, Tag
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    ApiModel,
    IgnoredValues,
    Text,
    form_discriminator,
)
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.grammar import grammars
from halfmoon_conductor.grammar.grammars import RequestedGrammar

Schema = dict[str, JsonValue]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


def _schema_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "object" if isinstance(value, dict) else None


#: vLLM takes a schema as an object or as its text.
SchemaOrText = Annotated[
    Annotated[Schema, Tag("object")] | Annotated[Text, Tag("text")],
    form_discriminator("must be a JSON schema, as an object or as its text", _schema_form),
]


class JsonSchema(ApiModel):
    """A schema with a name, as OpenAI wraps it."""

    name: Text = Field(description="A label; changes nothing.")
    description: Text | None = Field(None, description="A label; changes nothing.")
    # Its name in requests is one that pydantic's models have already.
    schema_: Schema | None = Field(None, alias="schema", description="Left out: any object.")
    strict: bool | None = Field(None, description="The schema is kept to either way.")


def format_kind(value: Any) -> str | None:
    """The type that a format says it has."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def check_format_type(value: Any) -> Any:
    """Refuse, by name, the types that are none of ours."""
    if format_kind(value) in (None, "text", "json_object", "json_schema"):
        return value
    raise PydanticCustomError(
        "not_supported",
        'is not supported with this type; "text", "json_object" and "json_schema" are',
    )


class TextFormat(ApiModel):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(ApiModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(ApiModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[ObjectFormat, Tag("json_object")]
    | Annotated[SchemaFormat, Tag("json_schema")],
    form_discriminator("must be an object with a type", format_kind),
    BeforeValidator(check_format_type),
]


def schema_of(asked: TextFormat | ObjectFormat | SchemaFormat | None) -> Schema | None:
    """The schema that an answer has to be JSON of; None: any text will do."""
    if isinstance(asked, SchemaFormat):
        return asked.json_schema.schema_ or {"type": "object"}
    return {"type": "object"} if isinstance(asked, ObjectFormat) else None


class StructuredOutputs(ApiModel):
    """vLLM's wishes for an answer's form; exactly one of them."""

    json_: SchemaOrText | None = Field(None, alias="json")
    regex: Text | None = Field(None, description="The whole answer matches it.")
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="Lark, or GBNF.")
    json_object: bool | None = None

    disable_any_whitespace: Annotated[Any, IgnoredValues(False)] = None
    disable_additional_properties: Annotated[Any, IgnoredValues(False)] = None
    disable_fallback: Annotated[Any, IgnoredValues(False)] = None
    whitespace_pattern: Annotated[Any, IgnoredValues()] = None
    structural_tag: Annotated[Any, IgnoredValues()] = None


def grammar_of_fields(
    response_format: TextFormat | ObjectFormat | SchemaFormat | None,
    structured: StructuredOutputs | None,
    guided: StructuredOutputs,
    *,
    format_field: str = "response_format",
) -> RequestedGrammar | None:
    """The grammar that a request's fields ask for together; None: any text will do.

    Args:
        response_format: OpenAI's wish.
        structured: vLLM's.
        guided: the same under its older names.
        format_field: what the client calls the first one, for errors.

    Raises:
        InvalidRequest: two of them ask, or one can't be made a grammar of.
    """
    #: The field, what makes its grammar, and whether a client wrote that itself.
    asked: list[tuple[str, Callable[[], str], bool]] = []
    if (form := schema_of(response_format)) is not None:
        asked.append((format_field, lambda: grammars.grammar_of_schema(form), False))
    if structured is not None:
        parts = _parts(structured)
        if len(parts) != 1:
            raise InvalidRequest(
                "structured_outputs must have exactly one of json, regex, choice, grammar and "
                f"json_object; it has {len(parts)}.",
                param="structured_outputs",
            )
        asked += [("structured_outputs", make, name == "grammar") for name, make in parts]
    asked += [(f"guided_{name}", make, name == "grammar") for name, make in _parts(guided)]
    if not asked:
        return None
    param, make, own = asked[0]
    if len(asked) > 1:
        raise InvalidRequest(
            f"{param} and {asked[1][0]} both say what the answer must be; send one of them.",
            param=asked[1][0],
        )
    try:
        return RequestedGrammar(make(), param, own)
    except ValueError as error:
        raise InvalidRequest(f"{param} can't be used: {error}", param=param) from None


def _parts(wish: StructuredOutputs) -> list[tuple[str, Callable[[], str]]]:
    parts: list[tuple[str, Callable[[], str]]] = []
    if (schema := wish.json_) is not None:
        parts.append(("json", lambda: grammars.grammar_of_schema(_read(schema))))
    if (regex := wish.regex) is not None:
        parts.append(("regex", lambda: grammars.grammar_of_regex(regex)))
    if (choice := wish.choice) is not None:
        parts.append(("choice", lambda: grammars.grammar_of_choices(choice)))
    if (grammar := wish.grammar) is not None:
        parts.append(("grammar", lambda: grammars.check_client_grammar(grammar)))
    if wish.json_object:
        parts.append(("json_object", grammars.grammar_of_any_object))
    return parts


def _read(schema: Schema | str) -> Schema:
    return grammars.read_schema(schema) if isinstance(schema, str) else schema
