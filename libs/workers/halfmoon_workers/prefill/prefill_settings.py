"""Settings of a prefill worker."""

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_transfer.backends.backend_choices import check_backend_choices


class PrefillSettings(EngineSettings):
    """One prefill worker: how it cuts prompts, and which kvstore it would rather use."""

    worker_id: str = Field("prefill-0", description="Stable name of this worker in the cluster")
    chunk_tokens: Annotated[int, Field(ge=1)] = Field(
        512, description="Tokens at the most of a forward pass that several prompts share"
    )
    max_chunk_tokens: Annotated[int, Field(ge=1)] = Field(
        4096,
        description="Tokens at the most of one prompt's forward pass when no other goes before it;"
        " never less than chunk_tokens",
    )
    max_chunk_s: Annotated[float, Field(gt=0)] = Field(
        0.5,
        description="Predicted seconds at the most of a pass of more than chunk_tokens: so long may"
        " an urgent prompt or a cancellation wait for it",
    )
    queue_order: Annotated[str, AfterValidator(QUEUE_ORDERS.check)] = Field(
        "arrival",
        description="Which request of equal priority is computed first, by arrival or by the slack"
        f" until its first token is due: {QUEUE_ORDERS.names}",
    )
    max_requests: Annotated[int, Field(ge=1)] = Field(
        256, description="Requests held at the most, queued ones included"
    )
    home_kvstore: str = Field(
        "", description="kvstore to keep blocks in; empty: the conductor picks one on this host"
    )
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
