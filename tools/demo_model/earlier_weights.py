"""Take over the weights of an earlier demo model, whose tokenizer may have had other tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as SavedTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_EMBEDDINGS = "model.embed_tokens.weight"
#: What a byte-level tokenizer writes for a space.
_SPACE = "\u0120"


def load_earlier(model: Any, tokenizer: "Tokenizer", folder: Path) -> None:
    """Load weights from a folder; a token has the embedding that its text had there.

    A token that is new there begins like the same word with a space before it, else as the
    model has it.
    """
    weights = load_file(folder / "model.safetensors")
    old_ids = SavedTokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    old = weights[_EMBEDDINGS]
    embeddings = model.model.embed_tokens.weight.detach().clone()
    # The last coordinate is the same in every token (`initial_weights`).
    embeddings[:, -1] = old[:, -1].mean()
    for text, token in tokenizer.get_vocab().items():
        if text in old_ids:
            embeddings[token] = old[old_ids[text]]
        elif _SPACE + text in old_ids:
            embeddings[token] = 0.7 * old[old_ids[_SPACE + text]] + 0.3 * embeddings[token]
    weights[_EMBEDDINGS] = embeddings
    with torch.no_grad():
        missing, unknown = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unknown, unknown
