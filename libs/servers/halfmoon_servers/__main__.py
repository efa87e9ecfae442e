"""Bridge plain inference servers to conductors: `python -m halfmoon_servers`."""

import sys

from halfmoon_runtime.lifecycle import run_service
from halfmoon_servers.bridge.bridge_app import run
from halfmoon_servers.bridge.bridge_settings import BridgeSettings


def main() -> None:
    """Read the settings, and run until stopped."""
    settings = BridgeSettings.from_args(sys.argv[1:])
    run_service("servers", settings, lambda service: run(settings, service))


if __name__ == "__main__":
    main()
