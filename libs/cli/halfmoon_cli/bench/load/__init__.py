"""Plan the requests of a load, write their prompts, and send them on time."""
