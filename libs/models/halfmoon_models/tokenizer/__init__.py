"""Build the tokenizer of a model's folder as transformers builds it, without transformers.

Needs the extra `tokenizer` of this package (the library `tokenizers`). The entry points are
`tokenizer_builder.build_tokenizer` and `end_tokens.find_end_tokens`.
"""
