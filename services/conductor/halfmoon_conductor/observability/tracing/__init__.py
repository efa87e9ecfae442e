"""Spans put around the parts of a conductor."""
