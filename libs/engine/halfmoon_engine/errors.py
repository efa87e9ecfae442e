"""What can be wrong with a model or with how an engine is asked for one.

EngineError
├── BadEngineSpec      the text that names an engine can't be read
├── ModelNotFound      no such folder or hub id, or its files are incomplete
├── UnsupportedModel   the model's architecture is not one that a paged KV pool can hold
└── PoolNotAttached    a forward before `attach`
"""


class EngineError(Exception):
    """The base of all of these; its text names the thing, the value and the way out."""


class BadEngineSpec(EngineError, ValueError):
    """An engine's spec string with an unknown or unreadable part."""


class ModelNotFound(EngineError, FileNotFoundError):
    """Neither a folder with a model in it nor a hub id that could be fetched."""


class UnsupportedModel(EngineError, ValueError):
    """A model whose attention or state does not fit a paged KV pool; names type and reason."""


class PoolNotAttached(EngineError, RuntimeError):
    """A forward needs memory for KV: call `attach` first."""
