"""Describe which kvstores hold how much of one prompt, and which of them would send it."""

from collections.abc import Mapping
from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.estimates import PlacementRequest
from halfmoon_scheduling.placement.placement_mode import PlacementMode, PrefixSource


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """The cached prefixes of a prompt."""

    #: Blocks that each kvstore holds and that may be used; no value is 0.
    matches: Mapping[WorkerId, int]
    #: The kvstore that sends the longest prefix; None without any.
    longest: WorkerId | None
    n_longest: int
    #: Transfers under way there.
    n_active: int
    #: What a worker uses whose own kvstore holds nothing.
    if_none_own: PrefixSource

    @classmethod
    def of(
        cls,
        mode: PlacementMode,
        job: PlacementRequest,
        prefixes: Mapping[WorkerId, int],
        active_transfers: Mapping[WorkerId, int],
        servers: Mapping[WorkerId, str],
    ) -> "CachedPrefixes":
        """Choose the sender of the longest prefix: no server, then the fewest transfers.

        Args:
            mode: decides what a worker without a prefix uses.
            job: the request.
            prefixes: blocks of its prefix that each kvstore holds.
            active_transfers: transfers under way at each kvstore.
            servers: the server of each worker that is a part of one.
        """
        most = job.max_cached_blocks
        matches = {
            kvstore: n if n < most else most for kvstore, n in prefixes.items() if n and most
        }
        shared: Mapping[WorkerId, int] = matches
        if servers:
            shared = {kvstore: n for kvstore, n in matches.items() if kvstore not in servers}
        longest = min(
            shared,
            key=lambda k: (-matches[k], active_transfers.get(k, 0), k),
            default=None,
        )
        if longest is None:
            return cls(matches, None, 0, 0, PrefixSource.OWN)
        n_longest = matches[longest]
        return cls(
            matches,
            longest,
            n_longest,
            active_transfers.get(longest, 0),
            mode.prefix_source(0, n_longest),
        )
