"""Calls of tools in a model's text: syntax, parsing, grammars."""
