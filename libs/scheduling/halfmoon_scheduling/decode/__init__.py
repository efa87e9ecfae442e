"""Decide what a decode worker does next: its continuous batch and its pages."""
