"""Run checks against services with planted faults, and say which checks did not notice.

python -m tests.conform.planted_runs ROLE [PATTERN …]
"""

import asyncio
import fnmatch
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from halfmoon_conform.catalogue import all_checks
from halfmoon_conform.check import Check, ServiceRole
from halfmoon_conform.run import RunPlan, run_checks
from halfmoon_conform.subject.metadata_server import MetadataServer
from halfmoon_conform.subject.subject import Subject, SubjectProcess, fill_in
from halfmoon_conform.verdict import Verdict

FOLDER = Path(__file__).parent
FAULTS: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "planted_faults.yaml").read_text())
CLUSTER_KEY = "the moon is made of green cheese"
_FAKE = "fake://?layers=2"
FLAGS: dict[ServiceRole, list[str]] = {
    "kvstore": ["--transfer-grants", "on", "--capacity-mib", "8", "--reservation-ttl-s", "4",
                "--lease-ttl-s", "3"],
    "decode": ["--transfer-grants", "on", "--model", _FAKE, "--block-size", "16", "--pool-mib", "1",
               "--no-measure", "--landing-ttl-s", "8", "--local-prefill-tokens", "64"],
    "prefill": ["--model", _FAKE, "--block-size", "16", "--pool-mib", "4", "--no-measure",
                "--chunk-tokens", "32", "--max-chunk-tokens", "32"],
    "conductor": ["--model", "fake://", "--http-port", "{port}", "--metadata-port", "0"],
}  # fmt: skip
#: Patches that act when a service starts.
_FROM_THE_START = ("no-renewal", "record-for-ever", "no-curve", "no-tcp")
#: Seconds for an answer: a missing one is a failure that is waited for.
_ANSWER_S = 4.0


def service_command(
    role: ServiceRole, *, faulty: bool = False, more: tuple[str, ...] = ()
) -> list[str]:
    """Return the command that starts one of our services, with the kit's placeholders."""
    module = f"halfmoon_{role}"
    start = [str(FOLDER / "faulty_service.py"), module] if faulty else ["-m", module]
    common = [
        "--transfer-backends", "tcp", "--metadata", "{metadata}", "--worker-id", "{worker_id}",
    ]  # fmt: skip
    return [sys.executable, *start, *FLAGS[role], *common, *more]


def role_of(check: Check) -> ServiceRole:
    """Return the role whose service gets a check's fault."""
    role: ServiceRole = FAULTS[check.id].get("role", check.roles[0])
    return role


@contextmanager
def _key_file(keyed: bool, folder: Path) -> Iterator[str]:
    file = folder / "key"
    file.touch(mode=0o600)
    file.write_text(CLUSTER_KEY)
    yield str(file) if keyed else ""


async def _run(
    check: Check, role: ServiceRole, folder: Path, key_file: str, scene: "FaultyScene | None"
) -> Verdict:
    """Run one check: at the started process, or at one of its own."""
    plan = RunPlan(
        role=role,
        checks=[check],
        command=() if scene else _own_command(check, role),
        worker_id=scene.subject.worker_id if scene else f"own-{role}",
        store=scene.server.store if scene else None,
        metadata_url=scene.server.url if scene else "",
        cluster_key=CLUSTER_KEY if key_file else "",
        cluster_key_file=key_file,
        url="",
        logs=folder,
        seed=7,
        answer_s=_ANSWER_S,
    )
    (verdict,) = await run_checks(plan)
    return verdict


def _own_command(check: Check, role: ServiceRole) -> tuple[str, ...]:
    more = tuple(FAULTS[check.id].get("flags", ()))
    return tuple(service_command(role, faulty=True, more=more))


class FaultyScene:
    """One process that has one fault after the other."""

    def __init__(self, role: ServiceRole, folder: Path, key_file: str) -> None:
        key = CLUSTER_KEY if key_file else ""
        self.server = MetadataServer(key)
        worker_id = f"faulty-{role}"
        values = {"metadata": self.server.url, "worker_id": worker_id}
        command = fill_in(service_command(role, faulty=True), values)
        env = {"HALFMOON_CLUSTER_KEY_FILE": key_file} if key_file else {}
        process = SubjectProcess(command, env, folder / f"{worker_id}.log")
        self.subject = Subject(worker_id, self.server.store, key, process)

    async def restart(self) -> None:
        """Start it, or start it again where a fault has ended it; its record is there then."""
        assert self.subject.process is not None
        if not self.subject.process.running:
            await self.subject.start()
        while await self.subject.read_record() is None:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End the process."""
        assert self.subject.process is not None
        await self.subject.process.kill()
        await asyncio.to_thread(self.server.close)


async def run_planted(
    role: ServiceRole,
    checks: list[Check],
    *,
    keyed: bool,
    told: Callable[[Verdict], None] = lambda _: None,
) -> dict[str, Verdict]:
    """Plant the fault of each check, one after the other, and return the verdicts."""
    found: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as name, _key_file(keyed, Path(name)) as key_file:
        folder = Path(name)
        file = folder / "fault.json"
        file.write_text("")
        os.environ["HALFMOON_PLANTED_FAULT"] = str(file)
        shared = [check for check in checks if _shares(check, role)]
        scene = FaultyScene(role, folder, key_file) if shared else None
        try:
            for check in checks:
                if scene is not None and check in shared:
                    await scene.restart()
                file.write_text(msgspec.json.encode(FAULTS[check.id]).decode())
                at = scene if check in shared else None
                found[check.id] = await _run(check, role, folder, key_file, at)
                file.write_text("")
                told(found[check.id])
        finally:
            if scene is not None:
                await scene.close()
    return found


def _shares(check: Check, role: ServiceRole) -> bool:
    return (
        role != "conductor"
        and check.needs in ("shared", "alone")
        and check.id != "worker.metadata.away"
        and not {"record", "flags"} & set(FAULTS[check.id])
        and FAULTS[check.id].get("patch") not in _FROM_THE_START
    )


def planted_checks(role: ServiceRole, *, keyed: bool) -> list[Check]:
    """Return the checks whose faults are planted into this service."""
    return [
        check
        for check in all_checks()
        if check.id in FAULTS and role_of(check) == role and bool(check.keyed) == keyed
    ]


def main(role: Any, patterns: list[str]) -> int:
    """Print each check that did not notice its fault; return how many there are."""
    n_missed = 0
    for keyed in (False, True):
        checks = [
            check
            for check in planted_checks(role, keyed=keyed)
            if not patterns or any(fnmatch.fnmatchcase(check.id, p) for p in patterns)
        ]
        if not checks:
            continue
        verdicts = asyncio.run(run_planted(role, checks, keyed=keyed, told=_print))
        n_missed += sum(verdict.status != "failed" for verdict in verdicts.values())
    return n_missed


def _print(verdict: Verdict) -> None:
    mark = "failed" if verdict.status == "failed" else "MISSED"
    print(f"{mark} {verdict.check_id}: {verdict.status} {verdict.reason[:200]}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]) > 0)
