"""Around the scheduling core: its shell and the links to workers."""
