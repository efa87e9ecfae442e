"""Define the errors of models and of their names.

ModelError
├── BadEngineSpec      the text that names an engine can't be read
├── ModelNotFound      no such folder or hub id, or its files are incomplete
├── BrokenCheckpoint   files that are cut, contradict each other, or hold impossible values
└── UnsupportedModel   a whole model, of a kind or in a form that is not served

Texts may quote a checkpoint, whose author chose every byte. So each error's text is made one
line of printable characters, of bounded length.
"""

MAX_ERROR_CHARS = 700


class ModelError(Exception):
    """Base of all errors of models; the text has the thing, the value and the way out."""

    def __init__(self, text: str = "") -> None:
        super().__init__(one_line(text))


class BadEngineSpec(ModelError, ValueError):
    """An engine's spec string with an unknown or unreadable part."""


class ModelNotFound(ModelError, FileNotFoundError):
    """Neither a folder with a model in it nor a hub id that could be fetched."""


class BrokenCheckpoint(ModelError, ValueError):
    """A model's files are cut off, contradict each other, or hold values that can't be meant."""


class UnsupportedModel(ModelError, ValueError):
    """A model of a kind, or in a format, that is not served; names what it is and the reason."""


def one_line(text: object, limit: int = MAX_ERROR_CHARS) -> str:
    """Return a text as one line of printable characters, cut in its middle past `limit`.

    Runs of white space become one space, other unprintable characters their escapes.
    """
    # Cut before and after: long texts and their escapes are never processed whole.
    words = " ".join(_cut(str(text), 4 * limit).split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return _cut(shown, limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    end = limit // 4
    return f"{text[: limit - end - 3]} … {text[-end:]}"
