"""Keep transformers from asking the hub while it makes a model that has been fetched."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants


@contextmanager
def hub_offline() -> Iterator[None]:
    """Have each request to the hub fail meanwhile, in all threads of this process.

    Some code of transformers asks for what a configuration names, whatever `local_files_only` is.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
