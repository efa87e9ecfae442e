"""Run one decode worker: `python -m halfmoon_decode`."""

import sys

from halfmoon_decode.app import run
from halfmoon_engine.errors import EngineLost
from halfmoon_runtime.lifecycle import run_service
from halfmoon_workers.roles.role_settings import read_decode_settings


def main() -> None:
    """Read the settings, and run until stopped."""
    settings = read_decode_settings(sys.argv[1:], "python -m halfmoon_decode")
    run_service("decode", settings, lambda service: run(settings, service), lost=EngineLost)


if __name__ == "__main__":
    main()
