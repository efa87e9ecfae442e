"""Train and evaluate the demo model; the engine ships its weights."""
