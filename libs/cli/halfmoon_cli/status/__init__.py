"""Show a cluster in a terminal, as its conductor reports it: `halfmoon status`."""
