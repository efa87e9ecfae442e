"""Choose the names that the HTTP ports of a service answer to."""

import ssl

from halfmoon_runtime.allowed_hosts import (
    EVERY_HOST,
    AllowedHosts,
    own_names,
    read_allowed_hosts,
)
from halfmoon_runtime.server_tls import certificate_names
from halfmoon_runtime.settings import ServiceSettings


def hosts_to_check(
    settings: ServiceSettings, tls: ssl.SSLContext | None, *, has_keys: bool
) -> AllowedHosts | None:
    """Return the names that requests may be for; None: any.

    A page of another site has no key. So where one is needed, names are checked only if the
    settings list some.

    Args:
        settings: the service's.
        tls: made of the settings' certificate, whose names count too.
        has_keys: whether requests on this port need a key.
    """
    listed = read_allowed_hosts(settings.allowed_hosts)
    if EVERY_HOST in listed or (has_keys and not listed):
        return None
    given = [each.lower().removesuffix(".") for each in (settings.host, settings.advertise_host)]
    certified = () if tls is None else certificate_names(settings.tls_cert, tls)
    return AllowedHosts([*listed, *given, *own_names(), *certified])
