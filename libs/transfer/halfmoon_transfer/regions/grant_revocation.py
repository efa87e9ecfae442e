"""Follow a grant that was taken back until no access by it goes on."""

from collections.abc import Callable


class GrantRevocation:
    """A grant whose key opens nothing any more; an access that had begun may go on.

    The owner uses the bytes for something else once `is_over`, and not before.
    """

    def __init__(self, is_idle: Callable[[], bool], finish: Callable[[float], bool]) -> None:
        """Follow one grant; its key is removed.

        Args:
            is_idle: tells at once whether no access goes on.
            finish: waits for that, and cuts the connections of accesses after so many seconds.
        """
        self._is_idle = is_idle
        self._finish = finish

    @property
    def is_over(self) -> bool:
        """Tell whether no peer accesses the bytes any more. It stays so; an event loop may ask."""
        return self._is_idle()

    def finish(self, patience_s: float) -> bool:
        """Return when no peer accesses the bytes any more; it may take over a second.

        Args:
            patience_s: seconds until the connections of accesses that go on are cut.

        Returns:
            False if an access has not ended though its connection was cut a second ago.
        """
        return self._finish(patience_s)


#: Of a grant that ended with its region.
OVER = GrantRevocation(lambda: True, lambda _: True)
