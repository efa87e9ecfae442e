"""Print the operators' token in a container: `python -m halfmoon_runtime.print_operator_token`.

The images have no `halfmoon operator-token`, as they hold a service and no commands. This module
does the same with the cluster key of the container's service.
"""

import sys

from halfmoon_metadata.cluster_key_source import cluster_key_from_environment
from halfmoon_runtime.observability.operator_tokens import operator_token


def main() -> None:
    """Print the token of this process's cluster key."""
    try:
        token = operator_token(cluster_key_from_environment())
    except ValueError as error:  # the file can't be used, or what it holds is no key
        sys.exit(str(error))
    if not token:
        sys.exit("this service has no cluster key: its page and /debug want no token")
    print(token)


if __name__ == "__main__":
    main()
