"""Hold chat templates that have the format and the constructs of published ones.

Their sentences are written anew; their turns, markers, macros and checks are as the families' own.
"""

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

#: Files of a family's templates by name. Some families have one for conversations with tools.
_FILES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **{
            name: {"default": name}
            for name in (
                "llama3",
                "llama4",
                "qwen2.5",
                "qwen3",
                "qwen3_coder",
                "qwen2.5_vl",
                "gemma2",
                "gemma3",
                "phi3.5",
                "phi4",
                "phi4_mini",
                "mistral_v0.3",
                "mistral_small",
                "mixtral",
                "glm4",
                "glm4.5",
                "minimax_m2",
                "minicpm",
                "smollm2",
                "smollm3",
                "deepseek_r1",
                "deepseek_v3.1",
                "kimi_k2",
                "gpt_oss",
                "granite3",
                "olmo2",
                "nemotron",
                "exaone4",
                "falcon3",
                "chatml",
            )
        },
        "hermes": {"default": "chatml", "tool_use": "hermes_tool_use"},
        "command_r": {"default": "command_r", "tool_use": "command_r_tool_use"},
    }
)
TEMPLATE_FAMILIES = tuple(_FILES)


def templates_of(family: str) -> dict[str, str]:
    """Return a family's templates by name; most have one, the default."""
    folder = files(__package__)
    return {
        name: (folder / f"{file}.jinja").read_text(encoding="utf-8")
        for name, file in _FILES[family].items()
    }
