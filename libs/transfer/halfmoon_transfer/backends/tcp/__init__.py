"""Over TCP: persistent connections, several slices per frame, checksums, acknowledgements."""
