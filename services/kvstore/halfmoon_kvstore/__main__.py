"""`python -m halfmoon_kvstore`: one kvstore node."""

import sys

from halfmoon_kvstore.app import run
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.lifecycle import run_service


def main() -> None:
    """Read the settings, run until told to stop."""
    settings = KvstoreSettings.from_args(sys.argv[1:])
    run_service("kvstore", settings, lambda service: run(settings, service))


if __name__ == "__main__":
    main()
