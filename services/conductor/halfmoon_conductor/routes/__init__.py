"""The REST app and its routes."""
