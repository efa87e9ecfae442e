"""What can be wrong with the use of an engine; with models: `halfmoon_models.errors`."""


class PoolNotAttached(RuntimeError):
    """A forward needs memory for KV: call `attach` first."""
