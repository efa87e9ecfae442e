"""Read the settings of a worker that may have both roles.

A worker of one role knows the settings of that role. With `--roles prefill,decode` it knows those
of both, as flags and as variables.
"""

import argparse
import os
from collections.abc import Sequence

from halfmoon_protocol.messages import Role
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

_VARIABLE = f"{ENVIRONMENT_PREFIX}ROLES"


class FlexiblePrefillSettings(PrefillSettings, DecodeSettings):
    """The settings of a worker that starts as a prefill worker and can be a decode worker."""


class FlexibleDecodeSettings(DecodeSettings, PrefillSettings):
    """The settings of a worker that starts as a decode worker and can be a prefill worker."""


def read_prefill_settings(argv: Sequence[str], program: str) -> PrefillSettings:
    """Read the settings of a prefill worker.

    Invalid settings are printed and end the process with status 2; help ends it with 0.

    Args:
        argv: flags.
        program: name in messages, such as ``python -m halfmoon_prefill``.
    """
    of_both = _has_both(argv)
    return (FlexiblePrefillSettings if of_both else PrefillSettings).from_args(argv, program)


def read_decode_settings(argv: Sequence[str], program: str) -> DecodeSettings:
    """Read the settings of a decode worker; arguments and errors as `read_prefill_settings`."""
    return (FlexibleDecodeSettings if _has_both(argv) else DecodeSettings).from_args(argv, program)


def roles_of(settings: EngineSettings) -> tuple[Role, ...]:
    """Return the roles of these settings; empty if the worker keeps its own."""
    both = isinstance(settings, PrefillSettings) and isinstance(settings, DecodeSettings)
    return ("prefill", "decode") if both else ()


def _has_both(argv: Sequence[str]) -> bool:
    """Return whether flags or environment name both roles; they are checked later."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--roles", nargs="?", default=os.environ.get(_VARIABLE, ""))
    try:
        text = parser.parse_known_args(argv)[0].roles or ""
    except argparse.ArgumentError:
        return False
    return {"prefill", "decode"} <= {each.strip() for each in text.split(",")}
