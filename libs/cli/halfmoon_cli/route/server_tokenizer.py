"""Find the tokenizer of the model that servers serve."""

from pathlib import Path

from halfmoon_servers.client.server_description import ServerDescription

_TOKENIZER = "tokenizer.json"


class NoTokenizer(Exception):
    """The tokenizer of a server's model is not on this machine; the text has the way out."""


def find_tokenizer(description: ServerDescription) -> str:
    """Return the folder or hub id of a server's model, if its tokenizer is on this machine.

    Raises:
        NoTokenizer: it is not.
    """
    from huggingface_hub import try_to_load_from_cache

    for name in filter(None, (description.model_root, description.model)):
        if (Path(name) / _TOKENIZER).is_file():
            return name
        try:
            cached = try_to_load_from_cache(name, _TOKENIZER)
        except ValueError:
            continue  # no name of the hub
        if isinstance(cached, str):
            return name
    where = description.model_root or description.model
    raise NoTokenizer(
        f"{description.url} serves {where!r}, which is neither a folder with {_TOKENIZER} on this"
        " machine nor in the hub's cache: name the folder or hub id of its tokenizer with --model"
    )
