"""Run a worker's process: start after start, in one role or the other."""
