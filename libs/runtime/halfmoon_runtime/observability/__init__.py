"""Export logs, metrics and traces, and serves HTTP to operators."""
