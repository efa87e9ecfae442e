"""Define the fields of a conductor's `/debug/roles` that a terminal shows.

All fields have defaults and unknown ones are ignored, as in `status.debug_responses`. Only
`workers` is required.
"""

import msgspec


class RoleRow(msgspec.Struct, frozen=True):
    """One prefill or decode worker."""

    worker_id: str
    role: str | None = None
    roles: list[str] = []
    draining: bool = False
    pinned: str | None = None
    load: float | None = None
    changing_to: str | None = None
    has_begun: bool = False
    n_asked: int = 0


class RolePool(msgspec.Struct, frozen=True):
    """The load of one side."""

    load: float = 0.0
    n_workers: int = 0


class RoleStep(msgspec.Struct, frozen=True):
    """The change that the conductor makes next."""

    worker_id: str = ""
    to: str = ""
    due_s: float = 0.0


class RolesAnswer(msgspec.Struct, frozen=True):
    """`/debug/roles`."""

    workers: list[RoleRow]
    automatic: bool = False
    pools: dict[str, RolePool] = {}
    next: RoleStep | None = None
    rest_s: float = 0.0
    reason: str = ""


class RoleChanged(msgspec.Struct, frozen=True):
    """The answer to a change."""

    worker: RoleRow | None = None
