"""Store records behind HTTP: the client of `halfmoon_metadata.http_server`."""

import base64

import httpx
import msgspec

from halfmoon_metadata.cluster_key_source import CLUSTER_KEY_FILE_VARIABLE, CLUSTER_KEY_VARIABLE
from halfmoon_metadata.record_limits import check_key, check_prefix, check_ttl, check_value
from halfmoon_metadata.redacted_url import redact_url
from halfmoon_metadata.store_interface import MetadataError, MetadataRefused, MetadataUnreachable
from halfmoon_metadata.stores.given_etags import GivenEtags
from halfmoon_metadata.stores.http_call import call_with_retry
from halfmoon_metadata.tls_trust import trust_context

TIMEOUT_S = 5.0
_listing = msgspec.json.Decoder(dict[str, str])


class HttpStore:
    """A `MetadataStore` at a URL such as ``http://host:8000/metadata``.

    Args:
        url: address of the served `metadata_app`.
        token: shown with each request, see `metadata_token`; empty: nothing is shown.
        tls_ca: for https, see `trust_context`.
        timeout_s: seconds for one attempt to connect, send, and receive, each.

    Raises:
        ValueError: `url` is not a URL, or the file of CAs can't be used.
    """

    def __init__(
        self, url: str, *, token: str = "", tls_ca: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        try:
            self._url = str(httpx.URL(url)).rstrip("/")
            #: The URL without a password, for error texts.
            self._name = redact_url(self._url)
        except httpx.InvalidURL as error:
            shown = f"{redact_url(url)!r}: {redact_url(str(error))}"
            raise ValueError(f"metadata URL {shown}") from None
        self._client = httpx.Client(
            timeout=timeout_s,
            trust_env=False,
            verify=trust_context(tls_ca) if self._url.startswith("https:") else True,
            headers={"authorization": f"Bearer {token}"} if token else {},
        )
        #: What the server's answers to `get`, `put` and `compare_and_swap` said.
        self._etags = GivenEtags()

    def get(self, key: str) -> bytes | None:
        """See `MetadataStore.get`."""
        check_key(key)
        response = self._request("GET", {"key": key}, repeatable=True)
        if self._misses(response, key, 404):
            return None
        self._etags.keep(key, response.content, response.headers.get("etag"))
        return response.content

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """See `MetadataStore.put`."""
        check_key(key)
        check_value(key, value)
        response = self._request("PUT", _query(key, ttl_s), repeatable=True, body=value)
        self._misses(response, key)
        self._etags.keep(key, value, response.headers.get("etag"))

    def delete(self, key: str) -> bool:
        """See `MetadataStore.delete`."""
        check_key(key)
        response = self._request("DELETE", {"key": key})
        return not self._misses(response, key, 404)

    def list(self, prefix: str) -> dict[str, bytes]:
        """See `MetadataStore.list`."""
        check_prefix(prefix)
        response = self._request("GET", {"prefix": prefix}, repeatable=True)
        self._misses(response, prefix)
        try:
            records = _listing.decode(response.content)
            return {key: base64.b64decode(value, validate=True) for key, value in records.items()}
        except (msgspec.DecodeError, ValueError) as error:
            raise MetadataError(f"{self._name}: the answer is no listing: {error}") from None

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """See `MetadataStore.compare_and_swap`."""
        check_key(key)
        headers = (
            {"if-none-match": "*"}
            if expected is None
            else {"if-match": self._etags.etag_of(key, expected)}
        )
        if value is None:
            response = self._request("DELETE", {"key": key}, headers=headers)
            return not self._misses(response, key, 412)
        check_value(key, value)
        response = self._request("PUT", _query(key, ttl_s), headers=headers, body=value)
        if self._misses(response, key, 412):
            return False
        self._etags.keep(key, value, response.headers.get("etag"))
        return True

    def increment(self, key: str) -> int:
        """See `MetadataStore.increment`."""
        check_key(key)
        response = self._request("POST", {"key": key}, path="/increment")
        self._misses(response, key)
        try:
            return msgspec.json.decode(response.content, type=int)
        except msgspec.DecodeError as error:
            raise MetadataError(f"{self._name}: the answer is no counter: {error}") from None

    def close(self) -> None:
        """See `MetadataStore.close`."""
        self._client.close()

    def _request(
        self,
        method: str,
        query: dict[str, str],
        *,
        repeatable: bool = False,
        path: str = "",
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> httpx.Response:
        return call_with_retry(
            self._client,
            method,
            self._url + path,
            server=self._name,
            repeatable=repeatable,
            params=query,
            headers=headers,
            body=body,
        )

    def _misses(self, response: httpx.Response, key: str, miss: int | None = None) -> bool:
        """Return whether the response is `miss`, rather than success.

        Raises:
            MetadataError: the response is neither.
        """
        if response.status_code == 200:
            return False
        if response.status_code == miss:
            return True
        text = f"{self._name}: {key!r}: {response.status_code} {response.text[:600]}"
        if response.status_code >= 500:
            raise MetadataUnreachable(text)
        if response.status_code == 401:
            raise MetadataRefused(
                f"{self._name}: the metadata server did not accept this client: set "
                f"{CLUSTER_KEY_VARIABLE} (or {CLUSTER_KEY_FILE_VARIABLE}) to the key of its cluster"
            )
        if response.status_code in (400, 403, 413, 421):
            raise MetadataRefused(text)
        raise MetadataError(text)


def _query(key: str, ttl_s: float | None) -> dict[str, str]:
    check_ttl(key, ttl_s)
    if ttl_s is None:
        return {"key": key}
    return {"key": key, "ttl_s": repr(ttl_s)}
