"""Run one decode worker: `python -m halfmoon_decode`."""

import sys

from halfmoon_decode.app import run
from halfmoon_engine.errors import EngineLost
from halfmoon_runtime.lifecycle import run_service
from halfmoon_workers.decode.decode_settings import DecodeSettings


def main() -> None:
    """Read the settings, and run until stopped."""
    settings = DecodeSettings.from_args(sys.argv[1:])
    run_service("decode", settings, lambda service: run(settings, service), lost=EngineLost)


if __name__ == "__main__":
    main()
