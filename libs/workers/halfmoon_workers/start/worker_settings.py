"""Define the settings that a worker of either role has."""

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from halfmoon_protocol.messages import Role
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_transfer.backends.backend_choices import check_backend_choices


class WorkerSettings(EngineSettings):
    """Settings of a prefill or decode worker: its transfers, and its waits for kvstores."""

    #: Role of the worker when it starts.
    starting_role: ClassVar[Role]

    kvstore_timeout_s: Annotated[float, Field(gt=0)] = Field(
        2.0, description="Seconds to wait for a kvstore's answer before doing without it"
    )
    kvstore_read_s: Annotated[float, Field(gt=0)] = Field(
        5.0,
        description="Seconds to wait for the next layer of cached blocks before they are read"
        " from another kvstore, or computed",
    )

    @field_validator("transfer_backends")
    @classmethod
    def _are_registered(cls, choices: str) -> str:
        return check_backend_choices(choices)

    @field_validator("roles")
    @classmethod
    def _include_the_starting_role(cls, roles: str) -> str:
        role = cls.starting_role
        if roles and role not in roles.split(","):
            raise ValueError(f"this service starts as {role}: write {role},{roles}")
        return roles
