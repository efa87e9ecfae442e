"""Define fields of several APIs on how tokens are drawn and when an answer ends."""

from typing import Any

from pydantic import Field

from halfmoon_conductor.api.request_fields import (
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    ApiModel,
    LogitBias,
    Stop,
    TokenId,
)


class SamplingFields(ApiModel):
    """Sampling fields, all optional; null equals leaving the field out."""

    temperature: float | None = Field(
        None, ge=0, le=2, allow_inf_nan=False, description="Default 1. 0 is greedy."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Default 1.")
    top_k: int | None = Field(
        None, ge=-1, le=MAX_TOKEN_ID, description="Keep so many likeliest tokens; 0 or -1: all."
    )
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Left out: another one for each request."
    )
    logit_bias: LogitBias | None = Field(
        None, description="Token ids, as strings, and what is added to their logits."
    )
    stop: Stop | None = Field(
        None, description="The text ends before the first of these that it would say."
    )
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True
    )
    ignore_eos: bool | None = Field(None, description="Go on after an end-of-text token.")

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields' values, for another API's request model."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}
