"""Generate tokens: landings, the continuous batch, its steps, answers."""
