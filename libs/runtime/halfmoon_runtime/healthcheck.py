"""Check this container's service: ``python -m halfmoon_runtime.healthcheck [URL]``.

The exit status is 0 if the service is healthy. The check reads the stage that the service writes
(see `halfmoon_runtime.lifecycle:report_stage`). Then it requests the URL, or else the service's
`/health`, which its event loop answers. It runs every few seconds in every container, so it
imports almost nothing.
"""

import json
import os
import sys

#: Environment variable that names the file to which a service writes its stage.
STATUS_FILE = "HALFMOON_STATUS_FILE"
#: Stages in which requests are served; a draining service still serves.
HEALTHY = ("ready", "draining")
_TIMEOUT_S = 3.0


def find_problem(environment: dict[str, str], url: str | None = None) -> str | None:
    """Return the fault of this container's service; None if it is healthy.

    Args:
        environment: holds `STATUS_FILE`, which names the file.
        url: must answer 200; None: `/health` at the address that the file states, if any.
    """
    path = environment.get(STATUS_FILE)
    if not path:
        return f"{STATUS_FILE} is not set, so nothing is known of the service"
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (pathlib takes longer to import than this)
            status = json.load(file)
        stage, operators = status.get("stage"), status.get("operators")
        is_tls = str(operators or status.get("url")).startswith("https://")
    except (OSError, ValueError, AttributeError) as error:
        return f"{path} can't be read: {error}"
    if stage not in HEALTHY:
        return f"the service is {stage}"
    url = url or (f"{operators}/health" if operators else None)
    if url and is_tls:  # an image's own check does not know of the settings
        url = url.replace("http://", "https://", 1)
    return _no_answer(url) if url else None


def _no_answer(url: str) -> str | None:
    from http.client import HTTPConnection, HTTPException

    scheme, _, rest = url.rpartition("://")
    address, _, path = rest.partition("/")
    if scheme == "https":
        import ssl
        from http.client import HTTPSConnection

        # It asks this container's own process, whose certificate names the service and not this
        # address, and shows no secret. So the certificate is not verified.
        unverified = ssl._create_unverified_context()
        connection: HTTPConnection = HTTPSConnection(
            address, timeout=_TIMEOUT_S, context=unverified
        )
    else:
        connection = HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        text = answer.read(500).decode(errors="replace")
    except (OSError, HTTPException) as error:
        return f"{url} does not answer: {error}"
    finally:
        connection.close()
    return None if answer.status == 200 else f"{url} answers {answer.status}: {text}"


if __name__ == "__main__":
    wrong = find_problem(dict(os.environ), *sys.argv[1:2])
    if wrong:
        sys.exit(wrong)
