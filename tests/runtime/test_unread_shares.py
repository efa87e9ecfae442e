"""What one caller has sent and nobody has read is bounded, and costs the others nothing."""

from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.channels.unread_shares import UnreadShares

FLOODING, HONEST = PeerId(b"f"), PeerId(b"h")


def test_a_caller_has_its_share_of_messages_and_others_have_theirs() -> None:
    shares = UnreadShares(2, 100)
    for _ in range(2):
        assert shares.fits(FLOODING, 10)
        shares.add(FLOODING, 10)
    assert not shares.fits(FLOODING, 10)
    assert shares.fits(HONEST, 10)
    shares.remove(FLOODING, 10)
    assert shares.fits(FLOODING, 10)


def test_a_caller_has_its_share_of_bytes() -> None:
    shares = UnreadShares(10, 100)
    shares.add(FLOODING, 60)
    assert not shares.fits(FLOODING, 41)
    assert shares.fits(FLOODING, 40)
    shares.remove(FLOODING, 60)
    assert shares.fits(FLOODING, 100)
