"""The fake engine and the interface load where torch is not installed."""

import subprocess
import sys

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None
import halfmoon_engine, halfmoon_engine.interface, halfmoon_engine.fake_engine
import halfmoon_testing.models.tiny_models
from halfmoon_engine.load import open_engine
engine = open_engine("fake://tiny?vocab=7", block_size=16, served_name="moon")
assert engine.name == "moon" and engine.layout.block_size == 16
"""


def test_the_fake_engine_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
