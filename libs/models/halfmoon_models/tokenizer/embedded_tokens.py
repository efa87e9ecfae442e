"""Compare the ids of a tokenizer with the number of tokens that its model embeds."""

import json
from collections.abc import Mapping
from pathlib import Path

from halfmoon_models.text_file_checks import check_embedded
from halfmoon_models.tokenizer.tokenizer_builder import BuiltTokenizer

_SHOWN = 5


def unembedded_tokens(
    folder: Path, built: BuiltTokenizer, n_embedded: int | None
) -> Mapping[int, str]:
    """Return the added tokens that the model has no embedding for, by their ids.

    Raises:
        BrokenCheckpoint: it has none for tokens of ordinary text.
    """
    added = built.fast.get_added_tokens_decoder()
    texts = {token.content for token in added.values()}
    check_embedded(folder, built.fast.get_vocab(with_added_tokens=False), texts, n_embedded)
    if n_embedded is None:
        return {}
    return {token: added[token].content for token in sorted(added) if token >= n_embedded}


def embedded_definition(built: BuiltTokenizer, unembedded: Mapping[int, str]) -> str:
    """Return the ``tokenizer.json`` of a tokenizer without tokens that the model does not embed.

    Grammars need it: their library wants a logit for each token.
    """
    if not unembedded:
        return built.definition
    content = json.loads(built.definition)
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["id"] not in unembedded
    ]
    vocab = content["model"].get("vocab")
    if isinstance(vocab, dict):
        for text in unembedded.values():
            vocab.pop(text, None)
    return json.dumps(content)


def unembedded_warning(folder: Path, unembedded: Mapping[int, str], n_embedded: int) -> str:
    """Return the line that says at the start which tokens can't be served."""
    shown = [f"{text[:40]!r} ({token})" for token, text in [*unembedded.items()][:_SHOWN]]
    more = f" and {len(unembedded) - _SHOWN} more" if len(unembedded) > _SHOWN else ""
    return (
        f"{folder}: the tokenizer has ids up to {max(unembedded)}, and the model embeds "
        f"{n_embedded} tokens (vocab_size in config.json); prompts with {', '.join(shown)}{more} "
        "are refused. Fetch both from one source, or resize the model with transformers' "
        "resize_token_embeddings"
    )
