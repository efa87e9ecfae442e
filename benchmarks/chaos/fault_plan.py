"""Plan the faults of a run: equal seeds give equal plans. Nothing here touches a process."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Kinds of faults of services, and how often each is drawn.
_OF_SERVICES = {"kill": 4.0, "pause": 3.0, "restart": 2.0}
#: Kinds of faults of a service's connection to Redis.
_OF_CONNECTIONS = {"redis stalled": 1.0, "redis cut": 1.0}
#: Kinds of faults of Redis itself.
_OF_REDIS = {"redis killed": 0.7, "redis emptied": 0.7, "redis paused": 0.7}
KINDS = (*_OF_SERVICES, *_OF_CONNECTIONS, *_OF_REDIS)
REDIS = "redis"
#: Seconds that a fault lasts: less than a lease and than heartbeats, or more.
_SHORT_S, _LONG_S = (0.2, 2.0), (2.0, 14.0)
#: Seconds in which a process that was started again gets no further fault.
_STARTS_S = 6.0


@dataclass(frozen=True)
class Fault:
    """One fault: its beginning, counted from that of the run, its kind, target and length."""

    at_s: float
    kind: str
    target: str
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind} {self.target} for {self.lasts_s:.1f} s"


def plan_faults(
    seed: int, seconds: float, services: Sequence[str], every_s: float
) -> tuple[Fault, ...]:
    """Draw the faults of a run.

    Args:
        seed: equal seeds give equal plans.
        seconds: no fault begins later.
        services: names of the processes.
        every_s: mean seconds from one fault to the next.

    Returns:
        Faults in the order of their beginning; two of one target never overlap.
    """
    dice = random.Random(seed)
    busy_until_s = dict.fromkeys((*services, REDIS), 0.0)
    weights = {**_OF_SERVICES, **_OF_CONNECTIONS, **_OF_REDIS}
    faults = []
    at_s = 0.0
    while (at_s := at_s + every_s * dice.uniform(0.4, 1.6)) < seconds:
        (kind,) = dice.choices(list(weights), weights=list(weights.values()))
        lasts_s = dice.uniform(*dice.choice((_SHORT_S, _LONG_S)))
        candidates = (REDIS,) if kind in _OF_REDIS else services
        free = [name for name in candidates if busy_until_s[name] <= at_s]
        if not free:
            continue
        target = dice.choice(free)
        busy_until_s[target] = at_s + lasts_s + _STARTS_S
        faults.append(Fault(at_s, kind, target, lasts_s))
    return tuple(faults)
