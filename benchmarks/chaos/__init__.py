"""Run a cluster of real processes under faults that a seed draws, and check every answer."""
