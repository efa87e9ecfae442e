"""Small shared records under leases: in memory, over HTTP, in Redis."""
