"""Run the Conductor's state machine: events in, commands out, and a journal to replay."""
