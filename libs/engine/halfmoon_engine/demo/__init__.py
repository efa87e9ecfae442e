"""The demo model: small enough to ship, and right or wrong in plain sight.

It is told names and numbers and gives back the number that a name had, however far up it
stands in the prompt. So a block of KV that was lost or mixed up shows as a wrong number.
What it can and can't do is in the README beside its files, `FOLDER`; the script that trained
it is `tools.demo_model.train`. Importing this package imports neither torch nor transformers.
"""

from pathlib import Path

#: The model in the Hugging Face layout: config, weights, tokenizer, chat template.
FOLDER = Path(__file__).parent / "model"

__all__ = ["FOLDER"]
