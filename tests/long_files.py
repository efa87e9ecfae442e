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
    "conform/test_services.py",
    "e2e/test_groups.py",
    "simulator/test_admission_margin.py",
    "e2e/test_role_faults.py",
    "e2e/test_dead_conductor.py",
    "cli/test_up.py",
    "e2e/test_tour.py",
    "e2e/test_demo_skills.py",
    "services/test_hostile_sequences.py",
    "e2e/test_demo_model.py",
    "polyglot/test_mixed_clusters.py",
    "e2e/test_many_streams.py",
    "e2e/test_hostile.py",
    "e2e/test_bad_days.py",
    "e2e/test_tutorials.py",
    "e2e/test_answers.py",
    "conform/test_planted_faults.py",
    "e2e/test_grants.py",
    "e2e/test_refused_models.py",
    "e2e/test_rolling_upgrade.py",
    "simulator/test_cluster_sim.py",
    "architecture/test_vllm_environment.py",
    "e2e/test_harmful.py",
    "conductor/test_checkpoint_trial.py",
    "e2e/test_many_members.py",
    "e2e/test_kept_pages.py",
    "e2e/test_local_prefill.py",
    "kvstore/test_segment_damage.py",
    "e2e/test_key_rotation.py",
    "services/test_grammars.py",
    "e2e/test_stalled_conductor.py",
    "e2e/test_decode_shares.py",
    "simulator/test_sim_role_changes.py",
    "connector/test_store_and_load.py",
    "e2e/test_second_cluster.py",
    "kvstore/test_soak.py",
    "cli/test_simulate.py",
    "e2e/test_tls.py",
    "kvstore/test_disk_tier.py",
    "kvstore/test_replication.py",
    "e2e/test_roles.py",
    "architecture/test_packages.py",
    "conform/test_reports.py",
    "benchmarks/test_engine_benchmark.py",
    "simulator/test_sim_copier.py",
    "simulator/test_pipeline_prompt.py",
    "e2e/test_replication.py",
    "fuzz/test_grammars.py",
    "kvstore/test_drain.py",
    "e2e/test_lost_engines.py",
    "kvstore/test_kv_command.py",
    "engine/test_model_types.py",
    "architecture/test_one_process.py",
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
