"""The faults that the in-memory network can make, and what both sides see of them."""

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.kv_events import AllBlocksCleared, KvEventBatch
from halfmoon_protocol.messages import Cancel, PrefillStopped
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.channels.network import Port, WorkerLink
from tests.runtime.service_parts import is_unreachable

MESSAGE = Cancel(request_id=RequestId("1"))


async def connected(network: MemoryNetwork) -> tuple[Port, WorkerLink]:
    port = await network.bind("decode-0")
    return port, await network.dial(port.commands, port.events)


async def test_a_killed_port_loses_what_it_had_not_read_and_its_links_keep_what_they_had() -> None:
    network = MemoryNetwork()
    port, link = await connected(network)
    await link.send(MESSAGE)
    peer, _ = await port.receive()
    await port.send(peer, MESSAGE)
    await link.send(MESSAGE)
    network.kill("decode-0")
    network.check()
    assert await link.receive() == MESSAGE
    await is_unreachable(link.receive(), "killed")
    await is_unreachable(link.send(MESSAGE), "killed")
    await is_unreachable(port.receive(), "killed")
    await is_unreachable(port.send(peer, MESSAGE), "gone")


async def test_a_partition_cuts_one_worker_off_until_it_heals() -> None:
    network = MemoryNetwork()
    cut, other = await network.bind("decode-0"), await network.bind("decode-1")
    link, untouched = await network.dial(cut.commands), await network.dial(other.commands)
    await link.send(MESSAGE)
    peer, _ = await cut.receive()
    network.partition("decode-0")
    network.check()
    await is_unreachable(link.send(MESSAGE), "heartbeats")
    await is_unreachable(cut.send(peer, MESSAGE))
    await is_unreachable((await network.dial(cut.commands)).send(MESSAGE), "no answer")
    await untouched.send(MESSAGE)
    assert (await other.receive())[1] == MESSAGE

    network.heal("decode-0")
    await is_unreachable(link.send(MESSAGE))  # a link that was down stays down
    again = await network.dial(cut.commands)
    await again.send(MESSAGE)
    assert (await cut.receive())[1] == MESSAGE


async def test_full_queues_refuse_commands_and_drop_publications() -> None:
    network = MemoryNetwork(inbox_messages=2)
    port, link = await connected(network)
    await link.send(MESSAGE)
    await link.send(MESSAGE)
    await is_unreachable(link.send(MESSAGE), "full")
    for _ in range(3):
        await port.publish_kv([AllBlocksCleared()])
    heard = [await link.receive() for _ in range(2)]
    assert [b.sequence for b in heard if isinstance(b, KvEventBatch)] == [0, 1]
    assert await port.publish_kv([AllBlocksCleared()]) == 3
    missed = await link.receive()
    assert isinstance(missed, KvEventBatch)
    assert missed.sequence == 3, "the gap can be seen"


async def test_a_message_that_can_not_be_read_is_dropped_by_its_receiver() -> None:
    network = MemoryNetwork()
    port, link = await connected(network)
    await link.send(Cancel(request_id=RequestId("")))
    await link.send(Cancel(request_id=RequestId("r")))
    peer, message = await port.receive()
    assert message == Cancel(request_id=RequestId("r"))
    await port.send(peer, PrefillStopped(request_id=RequestId("")))
    await port.send(peer, PrefillStopped(request_id=RequestId("r")))
    assert await link.receive() == PrefillStopped(request_id=RequestId("r"))
    await network.close()
