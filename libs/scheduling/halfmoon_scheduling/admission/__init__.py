"""Decide whether a request may go on now, and queue those that may not."""
