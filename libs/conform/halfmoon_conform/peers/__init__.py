"""Play the other ends of the wire: callers, listeners and transfer connections."""
