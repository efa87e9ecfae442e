"""Define the error of a step that could not be done."""

from halfmoon_scheduling.prefill.prefill_events import PrefillFailure


class PrefillRefused(Exception):
    """A step of a request could not be done; carries what its conductor is told."""

    def __init__(self, failure: PrefillFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure
