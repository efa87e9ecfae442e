"""Find kvstore nodes through the metadata server, and call their HTTP API for operators."""

from collections.abc import Callable
from typing import Any

import httpx

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_metadata import MetadataStore
from halfmoon_metadata.tls_trust import (
    certificate_problem,
    tls_ca_from_environment,
    trust_context,
)
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import MEMBERS, readable_members
from halfmoon_runtime.observability.operator_tokens import operator_token

_TIMEOUT_S = 15.0
#: Seconds between two polls of a drain.
DRAIN_POLL_S = 0.2


class KvstoreNodeError(Exception):
    """A node is missing, unreachable or refuses; the text has its name and its reason."""


class KvstoreNodes:
    """The kvstores of a cluster."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        key = read_cluster_key()
        headers = {"authorization": f"Bearer {operator_token(key)}"} if key else {}
        self._client = httpx.Client(
            timeout=_TIMEOUT_S,
            trust_env=False,
            headers=headers,
            verify=trust_context(tls_ca_from_environment()),
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def list_nodes(self) -> list[WorkerInfo]:
        """Return the records of all kvstores, in order of their names."""
        infos = readable_members(self._store.list(MEMBERS)).values()
        return sorted((i for i in infos if i.role == "kvstore"), key=lambda i: i.worker_id)

    def find_node(self, name: str) -> WorkerInfo:
        """Return the record of a kvstore by its name.

        Raises:
            KvstoreNodeError: it does not exist; the text names the existing ones.
        """
        infos = {info.worker_id: info for info in self.list_nodes()}
        for worker_id, info in infos.items():
            if worker_id == name:
                return info
        known = ", ".join(infos) or "none"
        raise KvstoreNodeError(f"there is no kvstore {name}; there are: {known}")

    def get(self, node: WorkerInfo, path: str, **query: Any) -> Any:
        """Send a GET to a node and return its JSON.

        Raises:
            KvstoreNodeError: it does not answer, or refuses.
        """
        return self._call(node, lambda url: self._client.get(url, params=query), path)

    def get_optional(self, node: WorkerInfo, path: str) -> Any | None:
        """Send a GET to a node; return its JSON, or None for a 404.

        Raises:
            KvstoreNodeError: it does not answer, or refuses.
        """
        return self._call(node, self._client.get, path, missing_is_none=True)

    def post(self, node: WorkerInfo, path: str, body: dict[str, Any]) -> Any:
        """Send a POST to a node and return its JSON.

        Raises:
            KvstoreNodeError: it does not answer, or refuses.
        """
        return self._call(node, lambda url: self._client.post(url, json=body), path)

    def _call(
        self,
        node: WorkerInfo,
        send: Callable[[str], httpx.Response],
        path: str,
        *,
        missing_is_none: bool = False,
    ) -> Any:
        if not node.http:
            raise KvstoreNodeError(
                f"{node.worker_id} answers no operators: start it without --metrics-port -1"
            )
        try:
            answer = send(node.http + path)
        except httpx.HTTPError as error:
            reason = certificate_problem(error) or error
            raise KvstoreNodeError(f"{node.worker_id} at {node.http}: {reason}") from None
        if answer.status_code == 404 and missing_is_none:
            return None
        if answer.status_code != 200:
            try:
                reason = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                reason = f"status {answer.status_code}"
            raise KvstoreNodeError(f"{node.worker_id}: {reason}")
        return answer.json()
