"""`python -m halfmoon_prefill`: one prefill worker."""

import sys

from halfmoon_engine.errors import EngineLost
from halfmoon_prefill.app import run
from halfmoon_runtime.lifecycle import run_service
from halfmoon_workers.roles.role_settings import read_prefill_settings


def main() -> None:
    """Read the settings, run until told to stop."""
    settings = read_prefill_settings(sys.argv[1:], "python -m halfmoon_prefill")
    run_service("prefill", settings, lambda service: run(settings, service), lost=EngineLost)


if __name__ == "__main__":
    main()
