"""Open the tokenizer of a model, without transformers or torch."""

from pathlib import Path

from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_files import fetch_tokenizer_files, naming_model
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_models.model_location import local_folder

#: Scheme of models that have no files, nor anything of a stranger's.
FAKE = "fake://"


def find_tokenizer(spec: str) -> str:
    """Return the folder of a model's tokenizer files, or a spec of ours that needs none.

    May download files: don't call it on the event loop.

    Raises:
        TokenizerUnavailable: no such folder or hub id.
    """
    if spec.startswith(FAKE):
        return spec
    with naming_model(spec):
        folder = local_folder(spec)
    return str(fetch_tokenizer_files(spec) if folder is None else folder)


def open_tokenizer(spec: str) -> Tokenizer:
    """Open the tokenizer of a model. Reads and may download files: don't call it on the event loop.

    Raises:
        TokenizerUnavailable: no such folder or hub id, or no ``tokenizer.json`` in it.
    """
    found = find_tokenizer(spec)
    if found.startswith(FAKE):
        return FakeTokenizer.from_spec(found)
    return HubTokenizer(Path(found), spec=spec)
