"""Locate the demo model: small enough to ship, and its errors are plain to see.

It is told names and numbers and gives back the number that a name had, however far up it
stands in the prompt. So a block of KV that was lost or mixed up shows as a wrong number.
Its abilities are in the README in `FOLDER`; `tools.demo_model.train` in a checkout trained it.
Importing this package imports neither torch nor transformers.
"""

from pathlib import Path

#: The model in the Hugging Face layout: config, weights, tokenizer, chat template.
FOLDER = Path(__file__).parent / "model"

__all__ = ["FOLDER"]
