"""Share Halfmoon's KV pool with stock vLLM servers, and hold what all uses of vLLM share."""
