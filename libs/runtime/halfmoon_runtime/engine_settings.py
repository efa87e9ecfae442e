"""Define the settings that all workers with a model share."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from halfmoon_runtime.observability.tracer_setup import TracedSettings


class EngineSettings(TracedSettings):
    """Settings of a worker with a model: the model, its precision and its KV memory."""

    model: str = Field(
        description="Folder or hub id of the model, or fake://… for the engine without a model"
    )
    engine: str = Field(
        "torch",
        description="What computes the model: torch, or vllm where halfmoon-engine-vllm is",
    )
    engine_options: dict[str, str] = Field(
        default_factory=dict,
        description='Options of the engine as JSON; vllm: {"tensor_parallel_size": "2"}',
    )
    served_model_name: str = Field(
        "", description="Name of the model as clients write it; empty: the model's own"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Precision of weights and KV; auto: the checkpoint's, or float32 on a processor"
        " without its instructions",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model computes; auto: CUDA if there is a device"
    )
    block_size: Annotated[int, Field(ge=16, le=512)] = Field(
        64, description="Tokens per KV block; all workers of a cluster must agree"
    )
    pool_mib: Annotated[int, Field(ge=0)] = Field(
        0, description="Memory for KV pages, in MiB; 0: by the model's context and what there is"
    )
    memory_mib: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Memory in MiB for weights and KV pages together, where pool_mib is 0; 0: most"
        " of a container's, or a quarter of what is free on the machine",
    )
    device_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="Part of a GPU's memory for weights and KV pages together, where pool_mib is 0",
    )
    threads: Annotated[int, Field(ge=0)] = Field(
        0, description="Threads for the model's arithmetic; 0: one per core of this process's quota"
    )
    measure: bool = Field(
        True, description="Time a few forward passes at the start, for the cost model"
    )
    forward_limit_s: Annotated[float, Field(gt=0)] = Field(
        300.0,
        description="Seconds after which a forward pass is taken to hang: the worker logs where,"
        " and exits to be started again",
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds to finish requests after the signal to stop"
    )

    roles: str = Field(
        "",
        description="Roles that this worker takes on when a conductor says so, separated by commas:"
        " prefill,decode; empty: only its service's own",
    )
    role_cooldown_s: Annotated[float, Field(ge=0)] = Field(
        60.0, description="Seconds after a change of role in which this worker refuses another one"
    )

    @field_validator("roles")
    @classmethod
    def _are_roles(cls, text: str) -> str:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in ("prefill", "decode")]:
            raise ValueError(f"{unknown[0][:40]!r} is no role of a worker: prefill or decode")
        return ",".join(dict.fromkeys(names))
