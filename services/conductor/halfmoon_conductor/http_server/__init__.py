"""Serve HTTP up to a route: bounded connections, keys and limits, bodies, error responses."""
