"""Text and token ids: template, tokenizer, detokenizer, stop strings."""
