"""Convert between text and token ids: chat template, tokenizer, detokenizer, stop strings."""
