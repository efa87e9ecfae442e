"""Define errors in the use of an engine; those of models are in `halfmoon_models.errors`."""


class PoolNotAttached(RuntimeError):
    """A forward needs memory for KV: call `attach` first."""
