"""Choose the prefill worker, the decode worker and the source of the cached prefix."""
