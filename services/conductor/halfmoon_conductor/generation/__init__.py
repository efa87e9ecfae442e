"""Generate: from an engine request to tokens, and from tokens to pieces of an answer."""
