"""Hold the state of one request: its phase, its deadline, and its landing at decode."""
