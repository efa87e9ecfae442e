"""``python -m halfmoon_runtime.healthcheck [URL]``: status 0 if the service here is well.

For a container's health check. It reads the progress that the service writes (see
`halfmoon_runtime.lifecycle:announce`), and asks the URL too, if there is one.
"""

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from halfmoon_runtime.lifecycle import STATUS_FILE

#: Stages in which requests are served. A service that drains still does.
WELL = ("ready", "draining")
_TIMEOUT_S = 3.0


def ailment(environment: dict[str, str], url: str | None = None) -> str | None:
    """What is wrong with this container's service; None: nothing.

    Args:
        environment: where `STATUS_FILE` names the file.
        url: what must answer 200, if anything must.
    """
    path = environment.get(STATUS_FILE)
    if not path:
        return f"{STATUS_FILE} is not set, so nothing is known of the service"
    try:
        stage = json.loads(Path(path).read_bytes()).get("stage")
    except (OSError, ValueError, AttributeError) as error:
        return f"{path} can't be read: {error}"
    if stage not in WELL:
        return f"the service is {stage}"
    return _no_answer(url) if url else None


def _no_answer(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}: {error.read(500).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer: {error}"
    return None


if __name__ == "__main__":
    wrong = ailment(dict(os.environ), *sys.argv[1:2])
    if wrong:
        sys.exit(wrong)
