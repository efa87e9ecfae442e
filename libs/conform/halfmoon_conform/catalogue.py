"""List all checks: those of `cases/*.yaml`, and those of the modules in `checks`."""

import fnmatch
import importlib
import pkgutil
from functools import cache

from halfmoon_conform import checks
from halfmoon_conform.check import Check, ServiceRole, add_check, registered_checks
from halfmoon_conform.data_cases.case_file import read_cases


@cache
def all_checks() -> tuple[Check, ...]:
    """Return every check, by id."""
    for case in read_cases():
        add_check(case)
    for module in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        importlib.import_module(module.name)
    return tuple(sorted(registered_checks(), key=lambda check: check.id))


def checks_of(role: ServiceRole, only: tuple[str, ...] = ()) -> list[Check]:
    """Return the checks of a role whose ids match one of these patterns; none: all."""
    return [
        check
        for check in all_checks()
        if role in check.roles
        and (not only or any(fnmatch.fnmatchcase(check.id, pattern) for pattern in only))
    ]
