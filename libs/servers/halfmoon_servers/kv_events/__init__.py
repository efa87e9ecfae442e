"""Follow the KV events of a server, and name its blocks by Halfmoon's hashes."""
