"""Checks of the source that ruff, mypy and import-linter do not make; `make check` runs them."""
