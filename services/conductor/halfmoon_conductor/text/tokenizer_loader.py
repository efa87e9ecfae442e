"""Open the tokenizer of a model, without transformers or torch."""

from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_files import fetch_tokenizer_files, naming_model
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_models.model_location import local_folder


def open_tokenizer(spec: str) -> Tokenizer:
    """Open the tokenizer of a model. Reads and may download files: don't call it on the event loop.

    Raises:
        TokenizerUnavailable: no such folder or hub id, or no ``tokenizer.json`` in it.
    """
    if spec.startswith("fake://"):
        return FakeTokenizer.from_spec(spec)
    with naming_model(spec):
        folder = local_folder(spec)
    return HubTokenizer(fetch_tokenizer_files(spec) if folder is None else folder, spec=spec)
