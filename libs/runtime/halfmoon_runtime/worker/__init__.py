"""Run a worker: registration, message loop, connections to conductors, forward watchdog."""
