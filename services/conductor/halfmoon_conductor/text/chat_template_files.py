"""Read a model's chat templates from the places where transformers finds them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import list_files, read_json_object, read_text
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES

_FILE, _SUFFIX = "chat_template.jinja", ".jinja"
#: Where processors of images kept the template, before it had a file of its own.
_PROCESSOR_FILE = "chat_template.json"
_FOLDER = "additional_chat_templates"
#: Most named templates; models have up to three.
_MAX_TEMPLATES = 64


def chat_templates_of(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a model's chat templates by name; most have one, the default.

    Files come first, all of them; then the tokenizer's config, which may have several by name;
    then the file of an image processor.

    Raises:
        ModelError: a file can't be read.
        ValueError: there are too many, or the config's are malformed.
    """
    names = list_files(folder)
    templates = {"default": read_text(folder / _FILE, MAX_SMALL_BYTES)} if _FILE in names else {}
    if _FOLDER in names and (folder / _FOLDER).is_dir():
        files = [name for name in sorted(list_files(folder / _FOLDER)) if name.endswith(_SUFFIX)]
        _check_number(files)
        for name in files:
            source = read_text(folder / _FOLDER / name, MAX_SMALL_BYTES)
            templates[name.removesuffix(_SUFFIX)] = source
    if templates:
        return templates
    if templates := _listed(tokenizer_config.get("chat_template")):
        return templates
    if _PROCESSOR_FILE in names:
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
