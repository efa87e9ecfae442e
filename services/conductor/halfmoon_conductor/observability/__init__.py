"""Observe the conductor: metrics, traces and recent history. No decision depends on any of it."""
