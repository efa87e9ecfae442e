"""Check that a landing which a decode worker offers can hold a request's KV."""

from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import DecodeReserved


def landing_fault(
    reserved: DecodeReserved, n_tokens: int, layout: KvLayout | None, *, may_hold: bool = False
) -> str:
    """Return what is wrong with a landing; empty when nothing is.

    Prefill workers would refuse a wrong landing in every try. The client would get an error for a
    request that another decode worker can serve.

    Args:
        reserved: the answer to a reservation.
        n_tokens: tokens whose KV is to land.
        layout: of the cluster.
        may_hold: whether blocks at its beginning may be there already.
    """
    landing = reserved.landing
    if layout is not None and landing.layout != layout:
        return "its layout is not the cluster's"
    needed = landing.layout.blocks_for(n_tokens)
    pages = landing.pages[:needed]
    if len(set(pages)) < needed:
        return f"{n_tokens} tokens need {needed} pages, it has {len(set(pages))}"
    end = (max(pages) + 1) * landing.layout.block_bytes
    if min(pages) < 0 or end > landing.region.length:
        return f"its pages end at byte {end}, its region has {landing.region.length}"
    n_held = reserved.n_held_blocks
    if n_held and not may_hold:
        return f"{n_held} blocks are there already, and nothing said which ones"
    if n_held * landing.layout.block_size >= n_tokens:
        return f"{n_held} blocks are there already, {n_tokens} tokens leave the last one to land"
    return "" if reserved.expires_s > 0 else "it is held for no time"
