"""Define fields that change no answer: they are checked, bounded and otherwise ignored."""

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from halfmoon_conductor.api.request_fields import ApiModel, Text

MAX_LABEL_CHARACTERS = 1024
MAX_WORD_CHARACTERS = 64
#: OpenAI's limits.
MAX_METADATA_KEYS = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512
MAX_CLIENT_METADATA_KEYS = 64
#: Values of `include` for which answers here have nothing.
_NEVER_INCLUDED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

Label = Annotated[Text, Field(max_length=MAX_LABEL_CHARACTERS)]
#: One of a few values that OpenAI defines, and extends.
Word = Annotated[Text, Field(max_length=MAX_WORD_CHARACTERS)]
Metadata = Annotated[
    dict[
        Annotated[Text, Field(max_length=MAX_METADATA_KEY_CHARACTERS)],
        Annotated[Text, Field(max_length=MAX_METADATA_VALUE_CHARACTERS)],
    ],
    Field(max_length=MAX_METADATA_KEYS),
]
#: What a client tells of itself. The body's limits bound its texts.
ClientMetadata = Annotated[dict[Label, Text], Field(max_length=MAX_CLIENT_METADATA_KEYS)]
Options = Annotated[dict[Word, Word | int | bool | None], Field(max_length=MAX_METADATA_KEYS)]


def _nothing_of_ours(names: list[str]) -> list[str]:
    for name in names:
        if name not in _NEVER_INCLUDED:
            raise PydanticCustomError(
                "not_supported", "is not supported with {name}; leave it out", {"name": name}
            )
    return names


Include = Annotated[
    list[Word], Field(max_length=MAX_METADATA_KEYS), AfterValidator(_nothing_of_ours)
]


class Reasoning(ApiModel):
    """Settings of a model's reasoning."""

    effort: Word | None = Field(None, description="For models whose template has such a switch.")
    summary: Word | None = Field(
        None, description="Changes nothing: thoughts are shown whole, not summarised."
    )
    generate_summary: Word | None = None
    context: Word | None = None
    mode: Word | None = None


class ObfuscationOptions(ApiModel):
    """Options of a stream of typed events."""

    include_obfuscation: bool | None = Field(None, description="Changes nothing: there is none.")
