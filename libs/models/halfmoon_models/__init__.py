"""Inspect a model's folder by its small files and headers alone.

It uses the standard library only, on bytes whose number is bounded first. It imports neither torch
nor transformers, runs and unpickles nothing, and reads no weight. The entry point is
`folder_inspection.inspect_folder`.
"""
