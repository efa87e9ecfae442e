"""Speak with OpenAI-compatible servers: requests, loads, KV events, prefill and decode pairs."""
