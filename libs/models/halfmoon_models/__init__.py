"""Inspect a model's folder by its small files and headers alone.

It uses bytes whose number is bounded first, and the standard library only; `tokenizer` needs the
library `tokenizers` too. It imports neither torch nor transformers, runs and unpickles nothing, and
reads no weight. The entry point is `folder_inspection.inspect_folder`.
"""
