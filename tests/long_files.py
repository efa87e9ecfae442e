"""Name the test files that take longest, of which the continuous integration runs a share.

`make test` runs all of them. `HALFMOON_SHARE=2/4` leaves out those outside the third of four
shares; a file that is named on the command line runs in any case.
"""

import os
from pathlib import Path

#: Which of how many shares, from 0: "0/4" to "3/4".
SHARE = "HALFMOON_SHARE"

#: Below tests/, the longest first: neighbours fall into different shares.
LONG_FILES = (
    "vllm/test_pd_pair.py",
    "vllm/test_rank_faults.py",
    "vllm/test_mixed_clusters.py",
    "vllm/test_connector_faults.py",
    "vllm/test_kv_events.py",
    "vllm/test_route.py",
    "vllm/test_quantised_models.py",
    "e2e/test_role_faults.py",
    "e2e/test_groups.py",
    "simulator/test_admission_margin.py",
    "polyglot/test_mixed_clusters.py",
    "e2e/test_refused_models.py",
    "e2e/test_hostile.py",
    "engine/test_model_types.py",
    "e2e/test_dead_conductor.py",
    "services/test_hostile_sequences.py",
    "e2e/test_local_prefill.py",
    "e2e/test_rolling_upgrade.py",
    "e2e/test_harmful.py",
    "e2e/test_kept_pages.py",
    "kvstore/test_segment_damage.py",
    "e2e/test_grants.py",
    "e2e/test_stalled_conductor.py",
    "e2e/test_tls.py",
    "e2e/test_roles.py",
    "architecture/test_one_process.py",
    "e2e/test_key_rotation.py",
    "e2e/test_lost_engines.py",
    "simulator/test_cluster_sim.py",
    "benchmarks/test_engine_benchmark.py",
    "kvstore/test_soak.py",
    "simulator/test_sim_role_changes.py",
    "simulator/test_pipeline_prompt.py",
)

_TESTS = Path(__file__).resolve().parent


def is_left_out(path: Path, share: str | None = None) -> bool:
    """Return whether a test file takes long and is in another share than this run's.

    Args:
        path: of the file.
        share: such as "2/4", by default from the environment; empty: all of them.

    Raises:
        ValueError: it is no such pair.
    """
    share = os.environ.get(SHARE, "") if share is None else share
    if not share:
        return False
    which, _, n = share.partition("/")
    if not (which.isdecimal() and n.isdecimal() and int(which) < int(n)):
        raise ValueError(f"{SHARE} is {share!r}: it must be like 0/4, the first of four shares")
    if not path.is_relative_to(_TESTS):
        return False
    name = path.relative_to(_TESTS).as_posix()
    return name in LONG_FILES and LONG_FILES.index(name) % int(n) != int(which)
