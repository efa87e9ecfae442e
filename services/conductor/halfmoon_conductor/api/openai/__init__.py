"""Completions and chat completions: request models, response objects, serializers."""
