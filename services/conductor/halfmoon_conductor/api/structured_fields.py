"""Define fields for structured output: OpenAI's `response_format`, and vLLM's fields."""

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


#: vLLM accepts a schema as an object or as its text.
SchemaOrText = Annotated[
    Annotated[Schema, Tag("object")] | Annotated[Text, Tag("text")],
    form_discriminator("must be a JSON schema, as an object or as its text", _schema_form),
]


class JsonSchema(ApiModel):
    """A JSON schema with a name, as OpenAI wraps it."""

    name: Text = Field(description="A label; changes nothing.")
    description: Text | None = Field(None, description="A label; changes nothing.")
    # pydantic's models already use the name `schema`.
    schema_: Schema | None = Field(None, alias="schema", description="Left out: any object.")
    strict: bool | None = Field(None, description="The schema is kept to either way.")


def format_kind(value: Any) -> str | None:
    """Return the type that a format declares."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def check_format_type(value: Any) -> Any:
    """Refuse unsupported types by name."""
    if format_kind(value) in (None, "text", "json_object", "json_schema"):
        return value
    raise PydanticCustomError(
        "not_supported",
        'is not supported with this type; "text", "json_object" and "json_schema" are',
    )


class TextFormat(ApiModel):
    """Any text will do."""

    type: Literal["text"]


class ObjectFormat(ApiModel):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class SchemaFormat(ApiModel):
    """The answer is JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[ObjectFormat, Tag("json_object")]
    | Annotated[SchemaFormat, Tag("json_schema")],
    form_discriminator("must be an object with a type", format_kind),
    BeforeValidator(check_format_type),
]


def schema_of(requested: TextFormat | ObjectFormat | SchemaFormat | None) -> Schema | None:
    """Return the schema that the answer has to match; None: any text will do."""
    if isinstance(requested, SchemaFormat):
        return requested.json_schema.schema_ or {"type": "object"}
    return {"type": "object"} if isinstance(requested, ObjectFormat) else None


class StructuredOutputs(ApiModel):
    """vLLM's fields for structured output; exactly one is set."""

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
    """Return the grammar that a request's fields ask for; None: any text will do.

    Args:
        response_format: OpenAI's field.
        structured: vLLM's field.
        guided: vLLM's fields under their older names.
        format_field: the client's name of `response_format`, for errors.

    Raises:
        InvalidRequest: two fields ask for a grammar, or one can't be turned into one.
    """
    #: The field, the function that builds its grammar, and whether the client wrote that grammar.
    requested: list[tuple[str, Callable[[], str], bool]] = []
    if (schema := schema_of(response_format)) is not None:
        requested.append((format_field, lambda: grammars.grammar_of_schema(schema), False))
    if structured is not None:
        builders = _grammar_builders(structured)
        if len(builders) != 1:
            raise InvalidRequest(
                "structured_outputs must have exactly one of json, regex, choice, grammar and "
                f"json_object; it has {len(builders)}.",
                param="structured_outputs",
            )
        requested += [("structured_outputs", build, name == "grammar") for name, build in builders]
    requested += [
        (f"guided_{name}", build, name == "grammar") for name, build in _grammar_builders(guided)
    ]
    if not requested:
        return None
    param, build, from_client = requested[0]
    if len(requested) > 1:
        raise InvalidRequest(
            f"{param} and {requested[1][0]} both say what the answer must be; send one of them.",
            param=requested[1][0],
        )
    try:
        return RequestedGrammar(build(), param, from_client)
    except ValueError as error:
        raise InvalidRequest(f"{param} can't be used: {error}", param=param) from None


def _grammar_builders(fields: StructuredOutputs) -> list[tuple[str, Callable[[], str]]]:
    builders: list[tuple[str, Callable[[], str]]] = []
    if (schema := fields.json_) is not None:
        builders.append(("json", lambda: grammars.grammar_of_schema(_read(schema))))
    if (regex := fields.regex) is not None:
        builders.append(("regex", lambda: grammars.grammar_of_regex(regex)))
    if (choice := fields.choice) is not None:
        builders.append(("choice", lambda: grammars.grammar_of_choices(choice)))
    if (grammar := fields.grammar) is not None:
        builders.append(("grammar", lambda: grammars.check_client_grammar(grammar)))
    if fields.json_object:
        builders.append(("json_object", grammars.grammar_of_any_object))
    return builders


def _read(schema: Schema | str) -> Schema:
    return grammars.read_schema(schema) if isinstance(schema, str) else schema
