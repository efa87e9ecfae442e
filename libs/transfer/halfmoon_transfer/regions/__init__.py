"""Register memory of this process: table, keys and bounds, files behind regions."""
