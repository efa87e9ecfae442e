"""Run one submitted request: check it, route it, carry it by its plan, count it."""
