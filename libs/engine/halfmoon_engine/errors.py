"""Define errors in the use of an engine; those of models are in `halfmoon_models.errors`."""

from halfmoon_models.errors import ModelError


class EngineNotInstalled(ModelError):
    """No installed package has the engine that was asked for."""


class BadEngineOption(ModelError, ValueError):
    """The engine has no such option, or not such a value."""


class PoolNotAttached(RuntimeError):
    """A forward needs memory for KV: call `attach` first."""


class EngineLost(RuntimeError):
    """The engine can't compute any more: its process must end, to be started again."""


class BadEngineStage(ModelError, ValueError):
    """The stage does not exist, or the model's layers can't be cut so."""
