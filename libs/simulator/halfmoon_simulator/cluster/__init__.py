"""Simulate a cluster in one process: the live Conductor over modelled workers and network."""
