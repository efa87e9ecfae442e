"""Hold the checks that are code; `cases` has those that are data."""
