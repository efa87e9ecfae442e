"""Send messages to live workers only: a worker that has left the cluster gets none."""

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import ToWorker
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.commands import AnyCommand, Send


def send_if_live(cluster: Cluster, worker_id: WorkerId, message: ToWorker) -> list[AnyCommand]:
    """Return the command to send a message, or none when the worker is not in the cluster."""
    return [Send(worker_id, message)] if worker_id in cluster else []
