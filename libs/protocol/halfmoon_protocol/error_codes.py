"""Name the causes of refusals and failures, for programs; texts are for people.

A code says why; `retryable`, `invalid` and `retry_after_s` beside it say what a sender does about
it, and stand when a code is unknown. A later version may add codes.
"""

NO_ROOM = "no_room"
TOO_LONG = "too_long"
DRAINING = "draining"
ID_IN_USE = "id_in_use"
NOT_HELD = "not_held"
OVER_LIMIT = "over_limit"
INVALID = "invalid"
UNSUPPORTED = "unsupported"
LAYOUT_MISMATCH = "layout_mismatch"
VERSION_MISMATCH = "version_mismatch"
PREEMPTED = "preempted"
EXPIRED = "expired"
PEER_FAILED = "peer_failed"
BAD_BYTES = "bad_bytes"
INTERNAL_ERROR = "internal_error"
GRAMMAR_FAILED = "grammar_failed"

MEANINGS = {
    NO_ROOM: "no page, block or key is free now",
    TOO_LONG: "it never fits this worker: its context, its pages, its memory",
    DRAINING: "the worker finishes what it has and takes nothing new",
    ID_IN_USE: "the request id or the ticket names something else here",
    NOT_HELD: "no landing, reservation or lease has this name on this connection, or any more",
    OVER_LIMIT: "a quota or a setting of this worker forbids it; another worker may take it",
    INVALID: "a value fits the wire and not its receiver, or contradicts another one",
    UNSUPPORTED: "the worker lacks a feature that the request needs",
    LAYOUT_MISMATCH: "the KV layouts differ, or the models",
    VERSION_MISMATCH: "no version of the protocol is common",
    PREEMPTED: "the worker took the request's pages for others",
    EXPIRED: "its time is over: the landing's, or the reservation's",
    PEER_FAILED: "another worker, the culprit, was not reached or did not do its part",
    BAD_BYTES: "bytes that were read are not what their checksums say",
    INTERNAL_ERROR: "the worker failed by itself, such as in a forward pass",
    GRAMMAR_FAILED: "the request's grammar can't be used, or takes too long",
}
ALL: tuple[str, ...] = tuple(MEANINGS)
