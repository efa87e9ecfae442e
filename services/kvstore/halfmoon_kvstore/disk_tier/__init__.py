"""Store blocks on disk: a folder of segment files, their superblocks and slot headers."""
