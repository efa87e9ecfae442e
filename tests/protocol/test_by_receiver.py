"""Messages by receiver: each message has one, and what a client matches by is there."""

import pytest

from halfmoon_protocol.messages import (
    ALL_MESSAGES,
    Message,
    ToConductor,
    ToDecode,
    ToFirstStage,
    ToFurtherStage,
    ToKvstore,
    ToKvstoreClient,
    ToPrefill,
)

RECEIVERS = {
    "conductor": ToConductor,
    "prefill": ToPrefill,
    "further stage": ToFurtherStage,
    "first stage": ToFirstStage,
    "decode": ToDecode,
    "kvstore": ToKvstore,
    "kvstore client": ToKvstoreClient,
}


@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda message: message.__name__)
def test_every_message_has_a_receiver(message: type[Message]) -> None:
    assert [name for name, union in RECEIVERS.items() if message in union.__args__]


@pytest.mark.parametrize("name", RECEIVERS)
def test_a_receiver_gets_only_messages_that_the_codec_reads(name: str) -> None:
    assert set(RECEIVERS[name].__args__) <= set(ALL_MESSAGES)


def test_every_answer_to_a_client_of_a_kvstore_has_the_ticket_of_its_question() -> None:
    assert all("ticket" in answer.__struct_fields__ for answer in ToKvstoreClient.__args__)
