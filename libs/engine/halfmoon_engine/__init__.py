"""Paged attention under transformers' own models, and a deterministic fake."""

from halfmoon_engine.interface import Draw, Engine, LayerHook, Run

__all__ = ["Draw", "Engine", "LayerHook", "Run"]
