"""List what Prometheus scrapes: `/debug/prometheus-targets`, for its HTTP service discovery.

    [{"targets": ["10.0.0.7:9100"], "labels": {"job": "decode", "worker": "decode-1", …}}]

The label `job` is a worker's role. A label `role` would hide that of the conductor's own metrics.
Labels that begin with `__` say how a target is scraped; Prometheus keeps none of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from halfmoon_protocol.messages import WorkerInfo

#: One group of targets with equal labels, as Prometheus reads it.
TargetGroup = dict[str, Any]

_PORTS = {"http": 80, "https": 443}


class PrometheusTargets:
    """Build the list for one conductor."""

    def __init__(self, conductor_id: str, conductor_urls: Sequence[str]) -> None:
        """Make the list of a conductor that serves metrics at these URLs."""
        self._conductor_id = conductor_id
        self._conductor_urls = tuple(conductor_urls)
        #: The last model that workers served. A label that went away with the last worker would
        #: begin new time series.
        self._model = ""

    def groups(self, workers: Iterable[WorkerInfo], model: str) -> list[TargetGroup]:
        """Return the conductor's targets, and those of all workers that state an address.

        Workers of one plain server share its address, and are one target.

        Args:
            workers: records of all live workers.
            model: name of the model that the cluster serves; empty: none now.
        """
        self._model = model or self._model
        found = [
            _group(url, "conductor", self._conductor_id, self._model)
            for url in self._conductor_urls
        ]
        for info in sorted(workers, key=lambda each: each.worker_id):
            job, worker = ("server", info.server) if info.server else (info.role, info.worker_id)
            found.append(_group(info.http, job, worker, info.model or self._model))
        groups: list[TargetGroup] = []
        for group in found:
            if group is not None and group not in groups:
                groups.append(group)
        return groups


def _group(url: str, job: str, worker: str, model: str) -> TargetGroup | None:
    """Return the group of one target; None where the URL is none that can be scraped."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    if port is None or not parts.hostname:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    labels = {"job": job, "worker": worker, "model": model, "__scheme__": parts.scheme}
    if path := parts.path.rstrip("/"):
        labels["__metrics_path__"] = f"{path}/metrics"
    return {"targets": [f"{host}:{port}"], "labels": labels}
