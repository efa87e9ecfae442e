"""Trace requests through the conductor."""
