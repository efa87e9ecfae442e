"""Serve Halfmoon's REST API and schedule its requests on the workers."""
