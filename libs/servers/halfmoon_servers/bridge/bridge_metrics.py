"""Name the metrics of a bridge."""

from collections.abc import Sequence

from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_servers.bridge.server_supervisor import ServerSupervisor


def bridge_metrics(supervisors: Sequence[ServerSupervisor]) -> MetricSnapshot:
    """Return the metrics of all servers, by their URLs."""
    up = {each.target.url: each.session for each in supervisors}
    caches = {
        url: session.server.cache
        for url, session in up.items()
        if session is not None and session.server is not None and session.server.cache is not None
    }
    return {
        "halfmoon_bridge_server_up": (
            "1 while a server answers, else 0.",
            by_label("server", {url: float(session is not None) for url, session in up.items()}),
        ),
        "halfmoon_bridge_sessions_total": (
            "Times that a server came up.",
            by_label("server", {each.target.url: float(each.n_sessions) for each in supervisors}),
        ),
        "halfmoon_bridge_requests": (
            "Requests at a server, reservations included.",
            by_label(
                "server",
                {url: float(s.n_requests) if s is not None else 0.0 for url, s in up.items()},
            ),
        ),
        "halfmoon_bridge_expected_cached_tokens": (
            "Prompt tokens that the index expected in a server's cache, since it came up.",
            by_label("server", {url: float(c.n_expected_tokens) for url, c in caches.items()}),
        ),
        "halfmoon_bridge_reported_cached_tokens": (
            "Prompt tokens that the server found in its cache, where it tells.",
            by_label("server", {url: float(c.n_reported_tokens) for url, c in caches.items()}),
        ),
    }
