"""Read the files of a folder that hold a chat template each."""

from pathlib import Path

from halfmoon_models.bounded_files import check_within, list_files, read_text
from halfmoon_models.errors import BrokenCheckpoint
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES

TEMPLATE_FILE = "chat_template.jinja"
_FOLDER, _SUFFIX = "additional_chat_templates", ".jinja"
#: Most named templates; models have up to three.
_MAX_TEMPLATES = 64


def read_template_files(folder: Path) -> dict[str, str]:
    """Return the sources of the template files by their paths in the folder, the default first.

    Raises:
        ModelError: one can't be read or leaves the folder, or there are too many.
    """
    names = [TEMPLATE_FILE] if TEMPLATE_FILE in list_files(folder) else []
    if (folder / _FOLDER).is_dir():
        check_within(folder / _FOLDER, folder)
        named = sorted(name for name in list_files(folder / _FOLDER) if name.endswith(_SUFFIX))
        if len(named) > _MAX_TEMPLATES:
            raise BrokenCheckpoint(
                f"{folder / _FOLDER}: {len(named)} chat templates are over the {_MAX_TEMPLATES} "
                "that are read: remove those that are not meant"
            )
        names += [f"{_FOLDER}/{name}" for name in named]
    return {name: read_text(folder / name, MAX_SMALL_BYTES, folder) for name in names}
