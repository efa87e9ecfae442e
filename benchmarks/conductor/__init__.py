"""What a conductor itself costs, beside routers of other projects, in one run."""
