"""Find the tokenizer of the model that servers serve."""

from halfmoon_models.bounded_files import list_files
from halfmoon_models.errors import ModelError
from halfmoon_models.model_location import local_folder
from halfmoon_models.text_file_checks import has_tokenizer
from halfmoon_servers.client.server_description import ServerDescription


class NoTokenizer(Exception):
    """The tokenizer of a server's model can't be found from here; the text has the way out."""


def find_tokenizer(description: ServerDescription) -> str:
    """Return the folder or hub id of a server's model, as the server names it.

    The conductor fetches a hub id, unless it is in the hub's cache.

    Raises:
        NoTokenizer: the name is of a folder that is not here, or that has no tokenizer.
    """
    name = description.model_root or description.model
    try:
        folder = local_folder(name)
    except ModelError:
        problem = f"which is neither a folder on this machine nor a hub id: {_WAY_OUT}"
    else:
        if folder is None or has_tokenizer(list_files(folder)):
            return name
        problem = f"a folder without a tokenizer that is read here: {_WAY_OUT}"
    raise NoTokenizer(f"{description.url} serves {name!r}, {problem}")


_WAY_OUT = "name the folder or hub id of its tokenizer with --model"
