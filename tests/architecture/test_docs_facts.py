"""Numbers and orders that the docs tell in sentences are those of the code.

Each fact is a sentence, or a part of one, with its numbers filled in from the code. When one of
them changes, its test fails until the page says so too.
"""

import json
import re
from pathlib import Path

import pytest

from halfmoon_cli.up.embedded_cluster import START_ORDER, EmbeddedCluster
from halfmoon_conductor.observability.history.latency_history import KEPT_SECONDS
from halfmoon_kvstore.drain import drain_controller, drain_migration
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_metadata import store_interface
from halfmoon_protocol import cluster_keys, error_codes, features
from halfmoon_runtime import membership
from halfmoon_runtime.channels.zmq_sockets import SocketSettings
from halfmoon_runtime.observability import operator_http
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_transfer.backends.tcp import dial_gate
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.p2p import object_record as p2p_records
from halfmoon_transfer.settings import TransferSettings

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
KVSTORE = KvstoreSettings.model_fields
#: As sentences say the roles.
MANY = {"kvstore": "kvstores", "prefill": "prefill", "decode": "decode workers"}


def text_of(page: str) -> str:
    """A page without its line breaks."""
    return re.sub(r"\s+", " ", (ROOT / page).read_text())


def roles_in_order() -> str:
    first, *middle, last = START_ORDER
    return f"the {first}, then {', '.join(MANY[role] for role in middle)} and {MANY[last]}"


def grace_s() -> float:
    defaults = EmbeddedCluster.stop.__defaults__
    assert defaults is not None
    return float(defaults[0])


def demo_bytes_per_token() -> str:
    config = json.loads((ROOT / "libs/engine/halfmoon_engine/demo/model/config.json").read_text())
    layers, heads, size = (
        config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    assert config["dtype"] == "float32"
    per_token = 2 * layers * heads * size * 4
    return (
        f"has {layers} layers with {heads} KV heads of {size} numbers in float32: a token takes"
        f" {layers} · {heads} · 2 · {size} · 4 = {per_token:,} bytes, a block of 64 tokens takes"
        f" {64 * per_token // 1024} KiB, and 1024 MiB hold {1024 * MIB // per_token:,} tokens"
    )


def record_row(prefix: str, lease_s: float | None) -> str:
    lease = "none" if lease_s is None else f"{lease_s:g} s, renewed three times as often"
    return rf"\| `{re.escape(prefix)}<[\w ]+>` \| [^|]+ \| {lease} \|"


FACTS = [
    # Who is there, and for how long.
    ("docs/protocol.md", record_row(membership.MEMBERS, membership.LEASE_S)),
    ("docs/protocol.md", record_row(membership.GENERATIONS, None)),
    ("docs/protocol.md", record_row(records.PREFIX, TransferSettings().lease_s)),
    ("docs/protocol.md", record_row(records.GENERATIONS, None)),
    ("docs/protocol.md", record_row(p2p_records.PREFIX, None)),
    (
        "docs/failures.md",
        f"stops answering after {SocketSettings().heartbeat_timeout_s:g} s \\(heartbeats\\);"
        f" a worker's record {membership.LEASE_S:g} s after its last renewal",
    ),
    (
        "docs/failures.md",
        f"heartbeats, {SocketSettings().heartbeat_timeout_s:g} s, or its lease,"
        f" {membership.LEASE_S:g} s",
    ),
    ("docs/transfer/p2p.md", f"its lease \\({TransferSettings().lease_s:g} s\\) gone"),
    # Limits of the metadata server.
    (
        "docs/protocol.md",
        f"keys of {store_interface.MAX_KEY_CHARS} characters,"
        f" values of {store_interface.MAX_VALUE_BYTES // MIB} MiB,"
        f" leases of a day, listings of {store_interface.MAX_LISTED_RECORDS:,} records and"
        f" {store_interface.MAX_LISTED_BYTES // MIB} MiB",
    ),
    # Blocks.
    (
        "docs/protocol.md",
        f"is renewed, {KVSTORE['lease_ttl_s'].default:g} s in Halfmoon's kvstores",
    ),
    (
        "docs/protocol.md",
        f"is discarded \\({KVSTORE['reservation_ttl_s'].default:g} s unless set otherwise;",
    ),
    ("docs/pool.md", f"After `deadline_s` \\({drain_controller._DEADLINE_S:g} by default\\)"),
    (
        "docs/pool.md",
        f"{drain_migration._MAX_BLOCKS} blocks or"
        f" {drain_migration._ORDER_BYTES // MIB} MiB at a time",
    ),
    # What operators are told.
    (
        "docs/operating.md",
        f"`/health` is 503 when the event loop does not answer within"
        f" {operator_http._ANSWER_S:g} s",
    ),
    (
        "docs/operating.md",
        f"The last {SchedulingConfig().kept_decisions} placements, deferrals and refusals",
    ),
    ("docs/operating.md", f"At most {operator_http._MAX_CONNECTIONS} connections are served"),
    ("docs/operating.md", f"It needs {cluster_keys.MIN_KEY_CHARACTERS} characters at least"),
    ("docs/operating.md", re.escape(demo_bytes_per_token())),
    # Stopping and starting again.
    (
        "docs/operating.md",
        f"stops them on Ctrl-C: {roles_in_order()}, each role for {grace_s():g} s at the most",
    ),
    # A dead peer.
    (
        "docs/failures.md",
        f"during a pause of {dial_gate._FIRST_PAUSE_S:g} to {dial_gate._LONGEST_PAUSE_S:g} s",
    ),
    # What refusals say, and what workers may lack.
    *(
        ("docs/protocol.md", rf"\| `{code}` \| {re.escape(meaning)} \|")
        for code, meaning in error_codes.MEANINGS.items()
    ),
    *(("docs/protocol.md", rf"\| `{feature}` \| ") for feature in features.ALL),
]


@pytest.mark.parametrize(("page", "fact"), FACTS)
def test_what_a_page_says_in_numbers_is_so(page: str, fact: str) -> None:
    assert re.search(fact, text_of(page)), f"{page} does not say: {fact}"


def test_a_worker_is_in_the_next_metadata_server_as_soon_as_the_page_says() -> None:
    assert "at this address within four seconds" in text_of("docs/operating.md")
    assert membership.LEASE_S / 3 + membership._RETRY_S < 4
    assert TransferSettings().lease_s / 3 < 4


def test_latencies_are_kept_as_long_as_the_page_says() -> None:
    assert "second by second, of the last ten minutes" in text_of("docs/operating.md")
    assert KEPT_SECONDS == 10 * 60


def test_every_stage_that_a_service_announces_is_listed() -> None:
    announced = {
        stage
        for folder in ("libs", "services")
        for source in (ROOT / folder).glob("*/halfmoon_*/**/*.py")
        for stage in re.findall(r'(?:announce|report_stage)\(\s*"(\w+)"', source.read_text())
    }
    listed = re.search(r"`stage` \(([\w, ]+)\)", text_of("docs/operating.md"))
    assert listed is not None
    assert set(listed[1].split(", ")) == announced


def test_the_conductor_is_stopped_first_as_the_page_advises() -> None:
    assert START_ORDER[0] == "conductor"
    assert "Stop the conductor first" in text_of("docs/operating.md")
