"""An engine request to tokens, and tokens to pieces of an answer."""
