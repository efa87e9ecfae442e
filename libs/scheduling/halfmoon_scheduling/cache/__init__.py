"""Keep the blocks of one tier: flat tables, eviction, pins, quotas, and the cache over them."""
