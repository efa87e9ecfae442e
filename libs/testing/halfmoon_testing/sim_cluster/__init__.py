"""Run the real services of a cluster in one thread, by a virtual clock and a seed."""
