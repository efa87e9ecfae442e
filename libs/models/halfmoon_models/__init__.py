"""What a model's folder holds, decided from its small files and headers alone.

Nothing here imports torch or transformers, runs or unpickles anything, or reads a weight: only
the standard library, on bytes whose number is bounded first. `folder.inspect_folder` is the
way in.
"""
