"""`python -m halfmoon_prefill`: one prefill worker."""

import sys

from halfmoon_engine.errors import EngineLost
from halfmoon_prefill.app import run
from halfmoon_runtime.lifecycle import run_service
from halfmoon_workers.prefill.prefill_settings import PrefillSettings


def main() -> None:
    """Read the settings, run until told to stop."""
    settings = PrefillSettings.from_args(sys.argv[1:])
    run_service("prefill", settings, lambda service: run(settings, service), lost=EngineLost)


if __name__ == "__main__":
    main()
