"""Define fields about tools: tools on offer, which to use, earlier calls and their results.

These are the fields of chat completions. The other APIs convert their tools, choices and calls to
these (`of`).
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.field_errors import contradiction
from halfmoon_conductor.api.request_fields import (
    MAX_CHOICES,
    ApiModel,
    Text,
    form_discriminator,
)
from halfmoon_conductor.tools.tool_call_bodies import parse_complete_members

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class UnservedTool(ApiModel):
    """A tool that is not served here: the model is not told of it.

    None of its other fields is used, so none is checked.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        return body


class _OrderedFields(ApiModel):
    """An object that remembers the order of its fields: chat templates write them in it."""

    _order: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(body)
        if isinstance(body, dict):
            made._order = tuple(body)
        return made

    def in_order(self) -> dict[str, Any]:
        """Return the fields that are set, in the client's order."""
        names = self._order or tuple(type(self).model_fields)
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class FunctionDefinition(_OrderedFields):
    """A tool's name, purpose and parameters."""

    name: Name
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(
        None, description="Whatever the choice: its arguments keep to the schema."
    )


class Tool(_OrderedFields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    @classmethod
    def of(
        cls,
        name: str,
        description: str | None,
        parameters: dict[str, JsonValue] | None,
        strict: bool | None,
    ) -> Self:
        """Return the tool with these properties."""
        function = FunctionDefinition(
            name=name, description=description, parameters=parameters, strict=strict
        )
        return cls(type="function", function=function)

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it, without `strict`, which is for grammars."""
        function = self.function.in_order()
        function.pop("strict", None)
        return self.in_order() | {"function": function}


class FunctionName(ApiModel):
    """The name of one of the tools."""

    name: Name


class NamedTool(ApiModel):
    """The choice of one tool that must be called."""

    type: Literal["function"]
    function: FunctionName

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the choice of the tool with this name."""
        return cls(type="function", function=FunctionName(name=name))


class AllowedTools(ApiModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)


class AllowedChoice(ApiModel):
    """The choice of some tools that may be called; the model is told of all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @classmethod
    def of(cls, mode: Literal["auto", "required"], names: Sequence[str]) -> Self:
        """Return the choice of the tools with these names."""
        tools = [NamedTool.of(name) for name in names]
        return cls(type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=tools))


def object_text(text: str) -> str:
    """Check that a text is a JSON object's, or empty for an object without members.

    A call that was cut off may be sent back too: it begins as an object does.

    Raises:
        PydanticCustomError: it is another text.
    """
    if text.lstrip()[:1] in ("", "{"):
        return text
    raise PydanticCustomError("not_an_object", "must be the text of a JSON object")


class CalledFunction(ApiModel):
    """The function that an earlier answer called."""

    name: Name
    arguments: Annotated[Text, AfterValidator(object_text)] = Field(
        description="A JSON object, as its text."
    )


class CalledTool(ApiModel):
    """A call of an earlier answer, sent back by the client."""

    id: Text
    type: Literal["function"]
    function: CalledFunction

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str) -> Self:
        """Return the call with this id.

        Args:
            call_id: the id that its result refers to.
            name: the function's name.
            arguments: the text of a JSON object.
        """
        function = CalledFunction(name=name, arguments=arguments)
        return cls(id=call_id, type="function", function=function)

    def for_template(self) -> dict[str, Any]:
        """Return the call for `MessageForms.of`: the arguments as an object, and as their text.

        Of arguments that are cut off, only complete members are kept.
        """
        function = {
            "name": self.function.name,
            "arguments": parse_complete_members(self.function.arguments),
            "arguments_text": self.function.arguments,
        }
        return {"id": self.id, "type": "function", "function": function}


def _choice_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "allowed_tools":
        return "allowed"
    return "named" if isinstance(value, dict | NamedTool) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedChoice, Tag("allowed")],
    form_discriminator(
        "must be none, auto, required, or an object that names functions", _choice_form
    ),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_CHOICES, fail_fast=True)]


def reject_other_types(known: Sequence[str | None], body: Any, way_out: str) -> Any:
    """Return a body whose type is one of these, or left out.

    The type is checked first: the error in a web search tool is its type, and not its unknown
    fields.

    Raises:
        PydanticCustomError: it has another type.
    """
    if isinstance(body, dict) and "type" in body and body["type"] not in known:
        raise PydanticCustomError(
            "not_supported",
            "is not supported with the type {kind}; {way_out}",
            {"kind": json.dumps(body["type"])[:100], "way_out": way_out},
        )
    return body


def check_tool_choice(tools: Sequence[Tool], choice: Any, left_out: Sequence[str] = ()) -> None:
    """Check that tool names are unique and that the chosen tool is on offer.

    Args:
        tools: those that the model may be told of.
        choice: of one, of some, or how free it is.
        left_out: names of tools that were sent and are not served here.

    Raises:
        PydanticCustomError: a name occurs twice, or the chosen tool is missing.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise contradiction("tools", "two of the tools have the same name")
    if choice == "required" and left_out and not names:
        raise PydanticCustomError(
            "not_supported",
            "tool_choice asks for a call, and {name} in tools is not served here; send functions "
            "of your own",
            {"field": "tool_choice", "name": left_out[0]},
        )
    if choice == "required" and not names:
        raise contradiction("tool_choice", "tool_choice is required without tools")
    for name in chosen_names(choice) or ():
        if name not in names and name in left_out:
            raise PydanticCustomError(
                "not_supported",
                "tool_choice names {name}, which is not served here; name a function of your own",
                {"field": "tool_choice", "name": name},
            )
        if name not in names:
            raise contradiction(
                "tool_choice", "tool_choice names {name}, which is none of the tools", name=name
            )


def chosen_names(choice: Any) -> list[str] | None:
    """Return the names of the tools that a choice leaves; None: all."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return None
