"""Follow the prefix cache of one server, in Halfmoon's block hashes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from halfmoon_protocol.kv_events import KvEvent
from halfmoon_servers.kv_events.block_translator import BlockTranslator
from halfmoon_servers.kv_events.event_source import CacheReset, KvEventSource


async def follow_cache(
    source: KvEventSource, translator: BlockTranslator
) -> AsyncGenerator[tuple[KvEvent, ...], None]:
    """Yield what changes in the cache, in order; it never ends by itself."""
    async with aclosing(source.follow()) as items:
        async for item in items:
            if isinstance(item, CacheReset):
                yield translator.clear()
            elif changes := translator.translate(item.events):
                yield changes
