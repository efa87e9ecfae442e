"""`python -m halfmoon_decode`: one decode worker."""

import sys

from halfmoon_decode.app import run
from halfmoon_decode.settings import DecodeSettings
from halfmoon_runtime.lifecycle import run_service


def main() -> None:
    """Read the settings, run until told to stop."""
    settings = DecodeSettings.from_args(sys.argv[1:])
    run_service("decode", settings, lambda service: run(settings, service))


if __name__ == "__main__":
    main()
