"""Build the parts of an engine, in order: context, backends, descriptor."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from halfmoon_transfer.backends import open_backend
from halfmoon_transfer.backends.backend_interface import Backend, EngineContext
from halfmoon_transfer.devices.device_table import DeviceTable
from halfmoon_transfer.interface import BackendUnavailable
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.planning.topology import Topology
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.settings import TransferSettings

if TYPE_CHECKING:
    from halfmoon_transfer.backends.fault_injection import FaultInjection

_log = logging.getLogger(__name__)


def make_context(
    name: str,
    generation: int,
    *,
    bind: str | Sequence[str],
    port: int,
    advertise: str | Sequence[str] | None,
    host_id: str | None,
    topology: Topology | None,
    settings: TransferSettings,
    now: Callable[[], float],
) -> EngineContext:
    """Make the context of the backends; see `TransferEngine.open` for the arguments.

    Raises:
        ValueError: the addresses to listen at and those to advertise don't match.
    """
    (bind, advertise), *more = _addresses(bind, advertise)
    regions = RegionTable(name, generation, now)
    return EngineContext(
        name=name,
        generation=generation,
        host_id=host_id or read_host_id(),
        bind=bind,
        port=port,
        advertise=advertise,
        more=tuple(more),
        topology=topology,
        regions=regions,
        devices=DeviceTable(regions, settings),
        notification_queue=NotificationQueue(name, generation, settings.max_notifications),
        settings=settings,
    )


def open_backends(
    choices: Sequence["str | FaultInjection"], context: EngineContext, undo: ExitStack
) -> dict[str, Backend]:
    """Open backends in order; leave out optional ones that are unavailable.

    Args:
        choices: names, or `FaultInjection` around one; a question mark means "if available".
        context: the engine that they belong to.
        undo: closes them if a later one fails.

    Raises:
        ValueError: no backend of this name, or settings that it can't use.
        BackendUnavailable: a library, driver or device of one is missing here.
        OSError: one can't listen at its address.
    """
    opened: dict[str, Backend] = {}
    for choice in choices:
        required = choice.removesuffix("?") if isinstance(choice, str) else choice
        try:
            backend = open_backend(required, context)
        except BackendUnavailable as error:
            if choice == required:
                raise
            _log.debug("%s is left out: %s", choice, error)
            continue
        undo.callback(backend.close)
        opened[backend.name] = backend
    return opened


def make_descriptor(context: EngineContext, backends: Iterable[Backend]) -> SegmentDescriptor:
    """Make the descriptor that peers need to reach an engine with these backends."""
    endpoints: dict[str, Endpoint] = {}
    for backend in backends:
        endpoints |= backend.endpoints
    return SegmentDescriptor(context.name, context.generation, context.host_id, endpoints)


def read_host_id() -> str:
    """Return an id that is equal in processes that can pass file descriptors to each other.

    It names the kernel's boot and the network namespace, to which abstract Unix sockets belong.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


def _addresses(
    bind: str | Sequence[str], advertise: str | Sequence[str] | None
) -> list[tuple[str, str | None]]:
    """Return each address to listen at, with the address to advertise for it."""
    binds = [bind] if isinstance(bind, str) else list(bind)
    advertised: Sequence[str | None] = (
        [advertise] if isinstance(advertise, str) else advertise or ()
    )
    if not binds or len(advertised) not in (0, len(binds)):
        raise ValueError(
            f"{len(binds)} addresses to listen at and {len(advertised)} to advertise: at least "
            "one, and as many of these as of those"
        )
    return list(zip(binds, advertised or [None] * len(binds), strict=True))
