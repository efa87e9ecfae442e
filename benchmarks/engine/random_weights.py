"""Make the measured models: folders with random weights, kept in the user's cache.

Saved in bfloat16; either engine reads them in the precision that is measured. Weights are spread
so that greedy answers vary.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.shapes import SHAPES, ModelShape

MODELS = Path.home() / ".cache" / "halfmoon" / "bench-models"


def model_folder(shape: ModelShape) -> Path:
    """Return the folder of a model, which is made first if it is not there.

    Raises:
        CalledProcessError: it could not be made; the process has said why.
    """
    folder = MODELS / shape.name
    if not (folder / "complete").exists():
        # In a process of its own, so that the one that measures holds no torch.
        command = [sys.executable, "-m", "benchmarks.engine.random_weights", shape.name]
        subprocess.run([*command, str(folder)], check=True)
    return folder


def _make(shape: ModelShape, folder: Path) -> None:
    import torch
    import transformers as untyped_transformers

    from halfmoon_testing.models.byte_tokenizer import (
        EOS_TOKEN_IDS,
        train_tokenizer,
        write_tokenizer,
    )

    transformers: Any = untyped_transformers
    torch.manual_seed(1969)
    config = transformers.AutoConfig.for_model(
        shape.kind,
        **shape.config(),
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=list(EOS_TOKEN_IDS),
        pad_token_id=EOS_TOKEN_IDS[0],
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(train_tokenizer([], shape.n_vocab), folder, max_context=shape.max_context)
    _name_all_tokens(folder / "tokenizer.json", shape.n_vocab)
    (folder / "complete").touch()


def _name_all_tokens(path: Path, n_vocab: int) -> None:
    """Give each id a text, so that every drawn token is one that servers send.

    No merge leads to the added ones: a text is split into its bytes.
    """
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"Ġw{i}": i for i in range(len(vocabulary), n_vocab)}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


if __name__ == "__main__":
    _make(SHAPES[sys.argv[1]], Path(sys.argv[2]))
