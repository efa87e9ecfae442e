"""Keep blocks in memory over disk as one cache: write-back, promotion and leases."""
