"""Measure a conductor's own cost beside routers of other projects, in one run."""
