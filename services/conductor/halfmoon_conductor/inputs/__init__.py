"""Turn a body into an engine request: parsing, preparation in child processes, model limits."""
