"""Build grammars for structured output, and check them in child processes."""
