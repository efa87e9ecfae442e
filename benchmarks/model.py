"""Make a model with random weights and 27 million parameters.

The demo model is too small to stand for others: its forward passes cost little more than the
requests for them.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCABULARY = range(300, 8000)
_VOCAB_SIZE = 8192
_MAX_CONTEXT = 16384


@contextmanager
def random_model() -> Iterator[str]:
    """Its folder, for as long as it is needed; takes some seconds to make."""
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, so that whoever measures holds no torch.
        subprocess.run([sys.executable, "-m", "benchmarks.model", folder], check=True)
        yield folder


def _make(folder: Path) -> None:
    import torch
    import transformers as untyped_transformers

    from halfmoon_testing.models.byte_tokenizer import (
        EOS_TOKEN_IDS,
        train_tokenizer,
        write_tokenizer,
    )

    transformers: Any = untyped_transformers
    torch.manual_seed(1969)
    config = transformers.Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=_MAX_CONTEXT,
        initializer_range=0.09,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=list(EOS_TOKEN_IDS),
        pad_token_id=EOS_TOKEN_IDS[0],
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(train_tokenizer([], _VOCAB_SIZE), folder, max_context=_MAX_CONTEXT)


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
