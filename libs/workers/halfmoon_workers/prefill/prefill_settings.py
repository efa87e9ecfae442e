"""Settings of a prefill worker."""

import re
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from halfmoon_protocol.bounds import MAX_STAGES
from halfmoon_protocol.messages import Role, Stage
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_workers.start.worker_settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """One prefill worker: how it cuts prompts, and which kvstore it would rather use."""

    starting_role: ClassVar[Role] = "prefill"

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

    group: str = Field(
        "",
        max_length=128,
        description="Group of prefill workers that compute long prompts together; empty: none",
    )
    stage: str = Field(
        "",
        description="This worker's run of layers in its group, as INDEX/N: 0/2 and 1/2 are the two"
        " stages of a group of two",
    )
    stage_layers_only: bool = Field(
        False,
        description="Load the layers of the stage alone, which takes less memory: this worker then"
        " computes prompts of its group only",
    )
    group_chunk_tokens: Annotated[int, Field(ge=1)] = Field(
        1024, description="Tokens at the most of a chunk of a prompt that the group computes"
    )
    max_shares: Annotated[int, Field(ge=1)] = Field(
        2, description="Prompts of the group that hold pages and activations here at a time"
    )

    @property
    def stage_record(self) -> Stage | None:
        """The stage as the worker's record states it; None: the worker is in no group."""
        if not self.group:
            return None
        index, n_stages = _parse_stage(self.stage)
        return Stage(self.group, index, n_stages, chunk_tokens=self.group_chunk_tokens)

    @model_validator(mode="after")
    def _is_a_stage(self) -> Self:
        if bool(self.group) != bool(self.stage):
            given, missing = ("group", "stage") if self.group else ("stage", "group")
            raise ValueError(
                f"--{given} is {getattr(self, given)!r} without --{missing}: a member of a group"
                " has both, such as --group long --stage 0/2"
            )
        if self.stage:
            _parse_stage(self.stage)
        elif self.stage_layers_only:
            raise ValueError(
                "--stage-layers-only is set without --stage: name the stage whose layers are"
                " loaded, such as --group long --stage 0/2"
            )
        if self.stage and self.roles:
            raise ValueError(
                f"--roles is {self.roles!r} with --group {self.group!r}: a member of a group keeps"
                " its role; leave one of them out"
            )
        return self


def _parse_stage(stage: str) -> tuple[int, int]:
    """Return the index of a stage, and the number of stages.

    Raises:
        ValueError: naming the value and what is allowed.
    """
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", stage)
    if match is None:
        raise ValueError(f"--stage is {stage!r}: it is INDEX/N, such as 0/2")
    index, n_stages = (int(part) for part in match.groups())
    if not 2 <= n_stages <= MAX_STAGES:
        raise ValueError(f"--stage is {stage!r}: a group has 2 to {MAX_STAGES} stages")
    if index >= n_stages:
        raise ValueError(
            f"--stage is {stage!r}: the stages of {n_stages} are 0/{n_stages} to"
            f" {n_stages - 1}/{n_stages}"
        )
    return index, n_stages
