"""Ask a server for its description, its load and tokens."""
