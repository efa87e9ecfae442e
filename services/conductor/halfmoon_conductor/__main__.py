"""Run one conductor: ``python -m halfmoon_conductor``."""

import os
import sys

from halfmoon_conductor.app import run
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_runtime.lifecycle import run_service


def main() -> None:
    """Read the settings and run until told to stop."""
    settings = ConductorSettings.from_args(sys.argv[1:])
    # Texts come one at a time, so the tokenizer's own threads would only compete with ours.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_service("conductor", settings, lambda service: run(settings, service))


if __name__ == "__main__":
    main()
