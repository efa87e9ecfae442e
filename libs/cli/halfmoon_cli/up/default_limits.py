"""The limits on waiting that `halfmoon up` gives its conductor, unless its user sets others."""

from collections.abc import Mapping, Sequence

from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX

#: Requests that may wait for a first token, and seconds of queue that one may wait behind. They
#: leave a burst its time, and no client waits for what it will hardly see.
MAX_QUEUED_REQUESTS, MAX_QUEUE_S = 256, 60.0

_LIMITS = {
    "max-queued-requests": str(MAX_QUEUED_REQUESTS),
    "max-queue-s": f"{MAX_QUEUE_S:g}",
}
#: For help texts.
SUMMARY = (
    f"at most {MAX_QUEUED_REQUESTS} requests wait for a first token, and none is admitted behind"
    f" more than {MAX_QUEUE_S:g} s of queue; others get 429 with Retry-After"
)


def default_limits(flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the limits by flag that neither the conductor's flags nor the environment set."""
    given = {flag.removeprefix("--").partition("=")[0] for flag in flags}
    return {
        flag: value
        for flag, value in _LIMITS.items()
        if flag not in given
        and f"{ENVIRONMENT_PREFIX}{flag.replace('-', '_').upper()}" not in environment
    }
