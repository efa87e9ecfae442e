"""Route requests: the REST app, its routes, and the way from a checked body to a response."""
