"""Define completions and chat completions: request models, response objects, serializers."""
