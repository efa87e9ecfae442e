"""Read cached prefixes from kvstores: choose a replica, fetch by layers, verify checksums."""
