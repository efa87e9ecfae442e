"""Structured output: fields to one grammar, checked in child processes."""
