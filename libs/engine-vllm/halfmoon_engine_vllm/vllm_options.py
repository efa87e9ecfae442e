"""Read the options that a user gives to vLLM as an engine."""

from collections.abc import Mapping

import msgspec

from halfmoon_engine.errors import BadEngineOption


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `--engine-options`, named as vLLM names them."""

    #: Processes that share the heads of each layer.
    tensor_parallel_size: int = 1
    #: Do not compile the model: it starts sooner and computes more slowly.
    enforce_eager: bool = False
    #: Format of quantised weights; empty: what the checkpoint says.
    quantization: str = ""


def read_options(options: Mapping[str, str]) -> VllmOptions:
    """Read options.

    Raises:
        BadEngineOption: an unknown name, or a value that is none.
    """
    try:
        read = msgspec.convert(dict(options), VllmOptions, strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(VllmOptions.__struct_fields__)
        raise BadEngineOption(f"options of engine vllm: {error}; there are {names}") from None
    if not 1 <= read.tensor_parallel_size <= 64:
        raise BadEngineOption(
            f"options of engine vllm: tensor_parallel_size is {read.tensor_parallel_size}, "
            "it is 1 to 64"
        )
    return read
