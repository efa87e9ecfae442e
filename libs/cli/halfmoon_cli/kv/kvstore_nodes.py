"""Kvstore nodes by their HTTP for operators: found through the metadata server, asked, told."""

import os
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from halfmoon_metadata import MetadataStore
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import MEMBERS
from halfmoon_runtime.observability.operator_http import operator_token

_TIMEOUT_S = 15.0
#: Seconds between two looks at a drain.
DRAIN_POLL_S = 0.2


class KvstoreNodeError(Exception):
    """A node is not there, can't be asked, or says no: the text names it and what it said."""


class KvstoreNodes:
    """The kvstores of a cluster."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        key = os.environ.get("HALFMOON_CLUSTER_KEY", "")
        headers = {"authorization": f"Bearer {operator_token(key)}"} if key else {}
        self._client = httpx.Client(timeout=_TIMEOUT_S, trust_env=False, headers=headers)

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def all(self) -> list[WorkerInfo]:
        """Every kvstore that is there, by name."""
        records = self._store.list(MEMBERS).values()
        infos = [msgspec.json.decode(record, type=WorkerInfo) for record in records]
        return sorted((i for i in infos if i.role == "kvstore"), key=lambda i: i.worker_id)

    def find_node(self, name: str) -> WorkerInfo:
        """One of them.

        Raises:
            NodeError: it is not there; the text names those that are.
        """
        infos = {info.worker_id: info for info in self.all()}
        for worker_id, info in infos.items():
            if worker_id == name:
                return info
        known = ", ".join(infos) or "none"
        raise KvstoreNodeError(f"there is no kvstore {name}; there are: {known}")

    def get(self, node: WorkerInfo, path: str, **query: Any) -> Any:
        """Ask a node.

        Raises:
            NodeError: it does not answer, or not with what was asked for.
        """
        return self._ask(node, lambda url: self._client.get(url, params=query), path)

    def find(self, node: WorkerInfo, path: str) -> Any | None:
        """Ask a node for what it may not have; None when it has not.

        Raises:
            NodeError: it does not answer, or says something else.
        """
        return self._ask(node, self._client.get, path, missing_is_none=True)

    def post(self, node: WorkerInfo, path: str, body: dict[str, Any]) -> Any:
        """Tell a node something.

        Raises:
            NodeError: it does not answer, or says no.
        """
        return self._ask(node, lambda url: self._client.post(url, json=body), path)

    def _ask(
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
            raise KvstoreNodeError(f"{node.worker_id} at {node.http}: {error}") from None
        if answer.status_code == 404 and missing_is_none:
            return None
        if answer.status_code != 200:
            try:
                reason = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                reason = f"status {answer.status_code}"
            raise KvstoreNodeError(f"{node.worker_id}: {reason}")
        return answer.json()
