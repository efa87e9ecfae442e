"""Know which kvstore holds which blocks; copy hot prefixes, and the blocks of draining nodes."""
