"""Run the tests that stay in this process, need no torch and take little time: `make test-fast`.

A pytest plugin: `python -m pytest -p tests.one_process`. What a test does decides: a file that
imports torch or transformers is skipped, and so is a test where it starts a process. The files
that take seconds all the same are listed here.
"""

import multiprocessing.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parent
#: Folders whose tests all need other processes, and files that wait for deadlines or try
#: thousands of inputs.
LEFT_OUT = frozenset(
    TESTS / name
    for name in (
        "bridge/test_routed_servers.py",
        "cli/test_bench.py",
        "cli/test_p2p.py",
        "cli/test_role_options.py",
        "cli/test_simulate.py",
        "clients",
        "compose",
        "conductor/test_api_page.py",
        "conductor/test_body_preparers.py",
        "conductor/test_body_receiver.py",
        "conductor/test_bounded_http.py",
        "conductor/test_counts.py",
        "conductor/test_cut_calls.py",
        "conductor/test_grammar_checker.py",
        "conductor/test_http_errors.py",
        "conductor/test_http_server.py",
        "conductor/test_label_fields.py",
        "conductor/test_openapi.py",
        "conductor/test_resumed_streams.py",
        "conductor/test_strict_tools.py",
        "conductor/test_tls_gate.py",
        "deploy/test_chart.py",
        "deploy/test_environment.py",
        "e2e",
        "fuzz",
        "kvstore/test_admin_api.py",
        "kvstore/test_disk_tier.py",
        "kvstore/test_drain.py",
        "kvstore/test_kv_command.py",
        "kvstore/test_kvstore.py",
        "kvstore/test_replication.py",
        "kvstore/test_scrubber.py",
        "kvstore/test_segment_damage.py",
        "kvstore/test_soak.py",
        "metadata/test_conformance.py",
        "metadata/test_tcp_ports.py",
        "metadata/test_unreachable.py",
        "polyglot",
        "runtime/test_network.py",
        "runtime/test_operator_http.py",
        "runtime/test_server_tls.py",
        "runtime/test_tracing.py",
        "runtime/test_zmq_network.py",
        "sandbox",
        "scheduling/tiers/test_tiered_cache.py",
        "services/test_answers.py",
        "services/test_bad_bytes.py",
        "services/test_first_token.py",
        "services/test_grants.py",
        "services/test_hostile_sequences.py",
        "services/test_hostile_to_decode.py",
        "services/test_hostile_to_prefill.py",
        "services/test_kept_pages.py",
        "services/test_local_prefill.py",
        "services/test_long_prompts.py",
        "services/test_memory_reuse.py",
        "services/test_misdirected_messages.py",
        "services/test_peer_endpoint_cache.py",
        "services/test_prefix_fetch.py",
        "services/test_replica_selector.py",
        "services/test_request.py",
        "services/test_role_changes.py",
        "services/test_stalled_decode.py",
        "sim_cluster",
        "simulator/test_admission_margin.py",
        "simulator/test_cluster_sim.py",
        "simulator/test_hit_rates.py",
        "simulator/test_paper_hybrid.py",
        "simulator/test_paper_overload.py",
        "simulator/test_pipeline_prompt.py",
        "simulator/test_sim_any_order.py",
        "simulator/test_sim_copier.py",
        "simulator/test_sim_local_prefill.py",
        "simulator/test_sim_role_changes.py",
        "simulator/test_synthetic_workloads.py",
        "transfer/backends/test_tcp.py",
        "transfer/backends/test_tcp_dead_peer.py",
        "transfer/backends/test_tcp_fast_path.py",
        "transfer/backends/test_tcp_multi_rail.py",
        "transfer/p2p/test_p2p_store.py",
        "transfer/test_conformance.py",
        "transfer/test_mooncake.py",
        "transfer/test_spray.py",
    )
)
#: Packages that take seconds to import.
HEAVY = frozenset({"torch", "transformers"})
#: Audit events that Python raises before it starts a process.
PROCESS_STARTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
)


class HeavyImportFinder:
    """Skip the file or the test that imports a heavy package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name.partition(".")[0] in HEAVY:
            pytest.skip(f"it imports {name}", allow_module_level=True)
        return None


def skip_process_start(*_: Any, **__: Any) -> int:
    """Skip the test that starts a process."""
    pytest.skip("it starts a process", allow_module_level=True)


def _on_audit_event(event: str, _: tuple[Any, ...]) -> None:
    if event in PROCESS_STARTS:
        skip_process_start()


def pytest_configure() -> None:
    """Watch imports and process starts from now on."""
    sys.meta_path.insert(0, HeavyImportFinder())
    sys.addaudithook(_on_audit_event)
    # Starts processes without an audit event.
    multiprocessing.util.spawnv_passfds = skip_process_start


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what takes long, without importing it."""
    return True if collection_path in LEFT_OUT else None


def pytest_sessionfinish() -> None:
    """Fail if a heavy package was imported after all."""
    if imported := HEAVY & sys.modules.keys():
        raise RuntimeError(f"{', '.join(sorted(imported))} was imported")
