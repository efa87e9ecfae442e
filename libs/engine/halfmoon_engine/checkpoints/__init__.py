"""Inspect a model folder, refuse what the engine cannot serve, and load the rest with torch."""
