"""Keep answered responses for a time, so that a next request goes on from them."""
