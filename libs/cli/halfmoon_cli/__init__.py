"""The halfmoon command."""
