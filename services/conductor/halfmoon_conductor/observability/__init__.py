"""Measures, spans and recent history; no decision looks at any of it."""
