"""Make tiny models, tokenizers, model folders and grammars for tests."""
