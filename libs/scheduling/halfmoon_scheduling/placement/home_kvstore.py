"""Choose the kvstore that keeps the blocks of a prefill worker."""

from collections.abc import Mapping

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.stable_draw import stable_draw


def choose_home(
    prefill: WorkerId,
    host: str,
    preferred: WorkerId | None,
    kvstores: Mapping[WorkerId, str],
) -> WorkerId | None:
    """Return the kvstore that keeps a prefill worker's blocks; None without live kvstores.

    The preferred kvstore comes first, then those on the same host, then any. Among several the
    highest hash of both names decides. So workers spread over kvstores, and a kvstore that joins
    or leaves moves only its own workers.

    Args:
        prefill: the prefill worker.
        host: its host.
        preferred: the kvstore that the worker's settings name.
        kvstores: hosts of the live kvstores.
    """
    if preferred is not None and preferred in kvstores:
        return preferred
    near = [kvstore for kvstore, where in kvstores.items() if where == host]
    return max(near or kvstores, key=lambda k: (stable_draw(prefill, k), k), default=None)
