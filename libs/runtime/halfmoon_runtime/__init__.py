"""Provide the parts of every service: channels, membership, lifecycle, settings, telemetry."""
