"""Fields about tools: those on offer, which to use, and calls handed back with their results.

They are chat completions' own. What the other APIs call a tool, a choice or a call becomes one
of these (`of`).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, Tag
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.request_fields import MAX_CHOICES, ApiModel, Text, form_discriminator
from halfmoon_conductor.tools.tool_call_bodies import parse_complete_members

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(ApiModel):
    """What a tool does and what it takes."""

    name: Name
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(
        None, description="Whatever the choice: its arguments keep to the schema."
    )


class Tool(ApiModel):
    """Something that the model may call."""

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
        """The one with these."""
        function = FunctionDefinition(
            name=name, description=description, parameters=parameters, strict=strict
        )
        return cls(type="function", function=function)

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it; `strict` is for grammars, not for the model."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionName(ApiModel):
    """Of one of the tools."""

    name: Name


class NamedTool(ApiModel):
    """The one to call."""

    type: Literal["function"]
    function: FunctionName

    @classmethod
    def of(cls, name: str) -> Self:
        """The one of this name."""
        return cls(type="function", function=FunctionName(name=name))


def object_text(text: str) -> str:
    """A text that is a JSON object's, or empty for one without names.

    An answer's call that was cut off may be handed back too: it begins as an object does.

    Raises:
        PydanticCustomError: it is not.
    """
    if text.lstrip()[:1] in ("", "{"):
        return text
    raise PydanticCustomError("not_an_object", "must be the text of a JSON object")


class CalledFunction(ApiModel):
    """What an earlier answer called."""

    name: Name
    arguments: Annotated[Text, AfterValidator(object_text)] = Field(
        description="A JSON object, as its text."
    )


class CalledTool(ApiModel):
    """A call of an earlier answer, handed back."""

    id: Text
    type: Literal["function"]
    function: CalledFunction

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str) -> Self:
        """The call of this id.

        Args:
            call_id: what its result is handed back with.
            name: of what was called.
            arguments: the text of a JSON object.
        """
        function = CalledFunction(name=name, arguments=arguments)
        return cls(id=call_id, type="function", function=function)

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it, with the arguments as an object.

        Of arguments that are cut off, those members that were complete.
        """
        function = {
            "name": self.function.name,
            "arguments": parse_complete_members(self.function.arguments),
        }
        return {"id": self.id, "type": "function", "function": function}


def _choice_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "word"
    return "named" if isinstance(value, dict | NamedTool) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")],
    form_discriminator(
        "must be none, auto, required, or an object that names a function", _choice_form
    ),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_CHOICES, fail_fast=True)]


def reject_other_types(known: Sequence[str | None], body: Any, way_out: str) -> Any:
    """A body whose type is one of these, or left out.

    Looked at before anything else of it: what is wrong with a web search is its type, and not
    that its fields are unknown.

    Raises:
        PydanticCustomError: it has another type.
    """
    if isinstance(body, dict) and "type" in body and body["type"] not in known:
        raise PydanticCustomError(
            "not_supported", "is not supported with this type; {way_out}", {"way_out": way_out}
        )
    return body


def check_tool_choice(tools: Sequence[Tool], choice: Any) -> None:
    """That what must be called is on offer.

    Raises:
        PydanticCustomError: it is not, or a name is there twice.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise PydanticCustomError("contradiction", "two of the tools have the same name")
    if choice == "required" and not names:
        raise PydanticCustomError("contradiction", "tool_choice is required without tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise PydanticCustomError("contradiction", "tool_choice names none of the tools")
