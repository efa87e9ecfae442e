"""What every service needs to stand up: channels, membership, lifecycle, telemetry."""
