"""Handle tool calls in a model's text: syntax, parsing, grammars."""
