"""Plan the faults of a run: equal seeds give equal plans. Nothing here touches a process."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Kinds of faults of services, and how often each is drawn.
_OF_SERVICES = {"kill": 4.0, "pause": 3.0, "restart": 2.0}
#: Kinds of faults of a service's connection to Redis.
_OF_CONNECTIONS = {"redis stalled": 1.0, "redis cut": 1.0}
#: Kinds of faults of Redis itself.
_OF_REDIS = {"redis killed": 0.7, "redis emptied": 0.7, "redis paused": 0.7, "redis full": 0.7}
#: Kinds of faults of all services of a rack, at once.
_OF_RACKS = {"rack killed": 1.5}
#: Kinds of faults of connections between services.
_OF_LINKS = {"link slow": 2.0, "link narrow": 1.0, "link stalled": 2.0, "link cut": 2.0}
#: Likewise, where both ends notice damage.
_OF_SAFE_LINKS = {"link damaged": 1.0}
#: Kinds of faults of a kvstore's disk.
_OF_DISKS = {"disk full": 1.0, "disk full at start": 0.7}
KINDS = (
    *_OF_SERVICES, *_OF_CONNECTIONS, *_OF_REDIS, *_OF_RACKS, *_OF_LINKS, *_OF_SAFE_LINKS, *_OF_DISKS
)  # fmt: skip
REDIS = "redis"
#: Seconds that a fault lasts: less than a lease and than heartbeats, or more.
_SHORT_S, _LONG_S = (0.2, 2.0), (2.0, 14.0)
#: Kinds that are hardly noticed in a short time.
_LONG = ("link slow", "link narrow", "link damaged", "disk full", "redis full")
#: Seconds in which a process that was started again gets no further fault.
_STARTS_S = 6.0
#: Delay of a slow link in seconds, and bytes per second of a narrow one.
_DELAY_S, _BYTES_PER_S = (0.01, 0.3), (16e3, 1e6)


@dataclass(frozen=True)
class Fault:
    """One fault: its beginning, counted from that of the run, its kind, target and length."""

    at_s: float
    kind: str
    target: str
    lasts_s: float
    #: Seconds of delay, or bytes per second; 0 where the kind has neither.
    amount: float = 0.0

    @property
    def members(self) -> tuple[str, ...]:
        """The services of a rack; of any other target itself."""
        return tuple(self.target.split())

    def __str__(self) -> str:
        amount = f", {self.amount:.3g}" if self.amount else ""
        return f"{self.at_s:7.1f} s  {self.kind} {self.target} for {self.lasts_s:.1f} s{amount}"


@dataclass(frozen=True)
class FaultTargets:
    """What faults may befall."""

    services: Sequence[str]
    #: Names of links: of all connections of a service, or of those between two.
    links: Sequence[str] = ()
    #: Kvstores whose disk can be filled.
    disks: Sequence[str] = ()
    #: Links with transfers whose ends notice damaged bytes.
    safe_links: Sequence[str] = ()
    #: Racks, each the names of its services with spaces between them.
    racks: Sequence[str] = ()

    def of_kinds(self) -> dict[str, tuple[float, Sequence[str]]]:
        """Return how often each kind is drawn, and its targets."""
        groups: tuple[tuple[dict[str, float], Sequence[str]], ...] = (
            ({**_OF_SERVICES, **_OF_CONNECTIONS}, self.services),
            (_OF_REDIS, (REDIS,)),
            (_OF_RACKS, self.racks),
            (_OF_LINKS, self.links),
            (_OF_SAFE_LINKS, self.safe_links),
            (_OF_DISKS, self.disks),
        )
        return {
            kind: (weight, targets)
            for weights, targets in groups
            if targets
            for kind, weight in weights.items()
        }


def plan_faults(
    seed: int, seconds: float, targets: FaultTargets, every_s: float
) -> tuple[Fault, ...]:
    """Draw the faults of a run.

    Args:
        seed: equal seeds give equal plans.
        seconds: no fault begins later.
        targets: what faults may befall.
        every_s: mean seconds from one fault to the next.

    Returns:
        Faults in the order of their beginning; two of one target never overlap. A service may have
        one while a link of it has another.
    """
    dice = random.Random(seed)
    kinds = targets.of_kinds()
    weights = [weight for weight, _ in kinds.values()]
    busy_until_s: dict[str, float] = {}
    faults = []
    at_s = 0.0
    while (at_s := at_s + every_s * dice.uniform(0.4, 1.6)) < seconds:
        (kind,) = dice.choices(list(kinds), weights=weights)
        lasts_s = dice.uniform(*(_LONG_S if kind in _LONG else dice.choice((_SHORT_S, _LONG_S))))
        free = [
            each
            for each in kinds[kind][1]
            if all(busy_until_s.get(member, 0.0) <= at_s for member in each.split())
        ]
        if not free:
            continue
        fault = Fault(at_s, kind, dice.choice(free), lasts_s, _amount(kind, dice))
        busy_until_s.update(dict.fromkeys(fault.members, at_s + lasts_s + _STARTS_S))
        faults.append(fault)
    return tuple(faults)


def _amount(kind: str, dice: random.Random) -> float:
    match kind:
        case "link slow":
            return dice.uniform(*_DELAY_S)
        case "link narrow":
            return dice.uniform(*_BYTES_PER_S)
        case _:
            return 0.0
