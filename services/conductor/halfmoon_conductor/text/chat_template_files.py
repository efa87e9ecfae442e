"""Read a model's chat templates from the places where transformers finds them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import list_files, read_json_object
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES
from halfmoon_models.tokenizer.template_files import (
    TEMPLATE_FILE,
    read_template_files,
)

#: Where processors of images kept the template, before it had a file of its own.
_PROCESSOR_FILE = "chat_template.json"
#: Most named templates in one field; models have up to three.
_MAX_TEMPLATES = 64


def chat_templates_of(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a model's chat templates by name; most have one, the default.

    Files come first, all of them; then the tokenizer's config, which may have several by name;
    then the file of an image processor.

    Raises:
        ModelError: a file can't be read.
        ValueError: there are too many, or the config's are malformed.
    """
    if files := read_template_files(folder):
        return {
            "default" if name == TEMPLATE_FILE else Path(name).stem: source
            for name, source in files.items()
        }
    if templates := _listed(tokenizer_config.get("chat_template")):
        return templates
    if _PROCESSOR_FILE in list_files(folder):
        content = read_json_object(folder / _PROCESSOR_FILE, MAX_SMALL_BYTES)
        return _listed(content.get("chat_template"))
    return {}


def _listed(value: Any) -> dict[str, str]:
    """Return the templates of a field: one text, or a list or an object of several by name."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        _check_number(value)
        value = {each["name"]: each["template"] for each in value}
    if not isinstance(value, dict):
        return {}
    _check_number(value)
    return {str(name): source for name, source in value.items() if isinstance(source, str)}


def _check_number(templates: Iterable[Any]) -> None:
    if (n := len(list(templates))) > _MAX_TEMPLATES:
        raise ValueError(f"{n} chat templates are over the {_MAX_TEMPLATES} that are read")
