"""Refuse stages by name: vLLM's executor sends activations by itself, between ranks it started."""

from halfmoon_engine.errors import BadEngineStage


def no_stages(index: int, n_stages: int) -> BadEngineStage:
    """Return the error for a stage that this engine is asked for."""
    return BadEngineStage(
        f"engine vllm computes all layers, stage {index} of {n_stages} was asked for: "
        "leave the stage out, or use engine torch"
    )
