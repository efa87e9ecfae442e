"""Summarise a run, and write it to the terminal, files and plots."""
