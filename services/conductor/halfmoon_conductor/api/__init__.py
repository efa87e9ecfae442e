"""Define request and response shapes: what the APIs share, and a package for each API."""
