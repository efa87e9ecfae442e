"""State what an engine, its memory and its network cost in seconds, and fit it to measurements."""
