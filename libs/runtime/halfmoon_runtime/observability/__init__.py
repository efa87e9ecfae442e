"""Export logs, metrics and traces, and serve HTTP to operators."""
