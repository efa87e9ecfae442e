"""Read how a model's makers want it sampled: the defaults of requests that do not say it.

They stand in generation_config.json beside the tokenizer. Each conductor of a cluster reads its own
copy, as it reads the chat template.
"""

from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import Field, ValidationError

from halfmoon_conductor.api.request_fields import MAX_TOKEN_ID
from halfmoon_conductor.api.sampling_fields import SamplingFields
from halfmoon_conductor.text.tokenizer_files import naming_model
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_models.bounded_files import list_files, read_json_object
from halfmoon_models.errors import one_line
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES

log = structlog.get_logger()

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
#: Known fields that would change answers and are not served, with the values that ask for nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "suppress_tokens": (),
    "typical_p": (1,),
}


class SamplingDefaults(SamplingFields):
    """Values of fields that a request leaves out; None: OpenAI's default."""

    max_new_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)

    @property
    def stated(self) -> dict[str, float | int]:
        """The fields that have a value, by name."""
        return self.model_dump(include=set(_NAMES), exclude_none=True)


#: OpenAI's defaults.
NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(source: str, how: Literal["auto", "none"]) -> SamplingDefaults:
    """Return the sampling defaults of a model. Reads files: don't call it on the event loop.

    Args:
        source: `Tokenizer.source`; the fake engine's has no files and no defaults.
        how: "none" leaves the file alone.

    Raises:
        TokenizerUnavailable: the file is damaged, or has a value that no request may have.
    """
    folder = Path(source)
    if how == "none" or source.startswith("fake://"):
        return NO_DEFAULTS
    with naming_model(source):
        config = read_json_object(folder / _FILE, MAX_SMALL_BYTES) if _is_there(folder) else {}
    unserved = [name for name, idle in _UNSERVED.items() if config.get(name) not in (None, *idle)]
    if unserved:
        log.warning("generation_config_fields_ignored", model=source, fields=unserved)
    stated = {name: config[name] for name in _NAMES if config.get(name) is not None}
    if config.get("do_sample") is False:
        stated["temperature"] = 0.0  # transformers draws nothing then, whatever else is there
    try:
        return SamplingDefaults.model_validate(stated)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise TokenizerUnavailable(
            f"{_FILE} of {source}: {name} is {one_line(repr(stated[name]), 60)}: {first['msg']}; "
            "mend the file, or start the conductor with --generation-config none"
        ) from None


def _is_there(folder: Path) -> bool:
    return _FILE in list_files(folder)
