"""Run checks against subjects: shared ones together on one, others on subjects of their own.

All subjects are started by the same command, beside each other. A running subject can't be doubled:
it serves all checks, one kind after the other, and nothing is killed.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from halfmoon_conform.check import NEEDS, Check, ServiceRole
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.data_cases.case_values import CaseError
from halfmoon_conform.peers.caller import ANSWER_S
from halfmoon_conform.peers.curve_sockets import Context
from halfmoon_conform.peers.transfer_connection import HungUp
from halfmoon_conform.subject.conductor_subject import ConductorSubject, free_port
from halfmoon_conform.subject.metadata_server import MetadataServer
from halfmoon_conform.subject.subject import (
    Subject,
    SubjectProcess,
    fill_in,
)
from halfmoon_conform.verdict import CheckFailed, CheckSkipped, Verdict
from halfmoon_metadata.store_interface import MetadataStore

#: Seconds after which a check that neither fails nor ends is given up.
_CHECK_S = 180.0
#: Checks that one subject runs in turn; more of them get a further subject.
_LANE_CHECKS = 12


@dataclass(frozen=True)
class RunPlan:
    """A run: which checks, against what."""

    role: ServiceRole
    checks: Sequence[Check]
    #: How a subject is started; empty: it runs already, as `worker_id`.
    command: Sequence[str]
    worker_id: str
    #: The store of the subject; None: each subject gets a metadata server of the kit.
    store: MetadataStore | None
    #: As the subject is told it; empty without a store.
    metadata_url: str
    cluster_key: str
    cluster_key_file: str
    #: Of the REST API of a running conductor.
    url: str
    logs: Path
    seed: int
    #: Shared checks that run at the same time.
    jobs: int = 32
    #: Seconds for an answer, on a machine that may be busy.
    answer_s: float = ANSWER_S
    #: Subjects of checks that need one alone, at the same time.
    subjects: int = 4
    on_verdict: Callable[[Verdict], None] = field(default=lambda _: None)
    #: Gets a line when a subject takes long to start.
    on_wait: Callable[[str], None] = field(default=lambda _: None)


async def run_checks(plan: RunPlan) -> list[Verdict]:
    """Run all checks of a plan, and return their verdicts in the order of the checks.

    Raises:
        CannotStartSubject: the command brings up no service.
    """
    run = _Run(plan)
    async with run.opened():
        verdicts = await run.all()
    order = {check.id: i for i, check in enumerate(plan.checks)}
    return sorted(verdicts, key=lambda verdict: order[verdict.check_id])


@dataclass(frozen=True)
class _Scene:
    """A subject, and its metadata server if that is the kit's."""

    subject: Subject
    metadata_server: MetadataServer | None


class _Run:
    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._sockets = Context()
        self._verdicts: list[Verdict] = []
        self._n_subjects = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._sockets.destroy(linger=0)

    async def all(self) -> list[Verdict]:
        by_needs = {needs: self._that_need(needs) for needs in NEEDS}
        parts = [
            self._run_shared(by_needs["shared"]),
            *(self._run_in_turn(lane) for lane in self._lanes(by_needs["alone"])),
            self._run_each([*by_needs["fresh"], *by_needs["killable"]]),
        ]
        if self._plan.command:
            await _all_of(parts)
        else:
            for part in parts:
                await part
        return self._verdicts

    def _lanes(self, checks: Sequence[Check]) -> list[Sequence[Check]]:
        """Share checks among subjects, each of which runs its own in turn."""
        n_lanes = 1 + len(checks) // _LANE_CHECKS if self._plan.command else 1
        return [checks[i::n_lanes] for i in range(n_lanes)]

    def _that_need(self, needs: str) -> list[Check]:
        return [check for check in self._plan.checks if check.needs == needs]

    async def _run_shared(self, checks: Sequence[Check]) -> None:
        if not checks:
            return
        async with self._scene() as scene:
            slots = asyncio.Semaphore(self._plan.jobs)

            async def one(check: Check) -> None:
                async with slots:
                    await self._run(check, scene)

            await _all_of([one(check) for check in checks])

    async def _run_in_turn(self, checks: Sequence[Check]) -> None:
        if not checks:
            return
        async with self._scene() as scene:
            for check in checks:
                await self._run(check, scene)

    async def _run_each(self, checks: Sequence[Check]) -> None:
        """Run checks with a subject each, a few at a time: they wait for starts and leases."""
        slots = asyncio.Semaphore(self._plan.subjects if self._plan.command else 1)

        async def one(check: Check) -> None:
            async with slots, self._scene() as scene:
                await self._run(check, scene)

        await _all_of([one(check) for check in checks])

    @asynccontextmanager
    async def _scene(self) -> AsyncIterator[_Scene]:
        """Bring up a subject, with a metadata server of its own where the kit serves that."""
        plan = self._plan
        if not plan.command:
            assert plan.store is not None
            subject = (
                ConductorSubject(plan.url, plan.store, plan.cluster_key)
                if plan.role == "conductor"
                else Subject(plan.worker_id, plan.store, plan.cluster_key)
            )
            await subject.start()
            yield _Scene(subject, None)
            return
        server = MetadataServer(plan.cluster_key) if plan.store is None else None
        try:
            async with self._started(server) as subject:
                yield _Scene(subject, server)
        finally:
            if server is not None:
                await asyncio.to_thread(server.close)

    @asynccontextmanager
    async def _started(self, server: MetadataServer | None) -> AsyncIterator[Subject]:
        plan = self._plan
        url = plan.metadata_url if server is None else server.url
        store = plan.store if server is None else server.store
        assert store is not None
        self._n_subjects += 1
        worker_id = f"{plan.worker_id}-{self._n_subjects}"
        folder = plan.logs / worker_id
        plan.logs.mkdir(parents=True, exist_ok=True)
        if any("{folder}" in part for part in plan.command):
            folder.mkdir(exist_ok=True)
        port = free_port()
        values = {
            "metadata": url,
            "worker_id": worker_id,
            "cluster_key_file": plan.cluster_key_file,
            "folder": str(folder),
            "port": str(port),
        }
        env = {"HALFMOON_METADATA": url, "HALFMOON_WORKER_ID": worker_id}
        if plan.cluster_key_file:
            env["HALFMOON_CLUSTER_KEY_FILE"] = plan.cluster_key_file
            # The kit encrypts; a service that was set otherwise would refuse all of it.
            env["HALFMOON_TRANSFER_ENCRYPTION"] = "on"
        process = SubjectProcess(fill_in(plan.command, values), env, plan.logs / f"{worker_id}.log")
        subject = (
            ConductorSubject(f"http://127.0.0.1:{port}", store, plan.cluster_key, process)
            if plan.role == "conductor"
            else Subject(worker_id, store, plan.cluster_key, process)
        )
        subject.on_wait = plan.on_wait
        if server is not None:
            subject.describe_requests = server.describe_requests
        try:
            await subject.start()
            yield subject
        finally:
            await process.kill()

    async def _run(self, check: Check, scene: _Scene) -> None:
        started = time.monotonic()
        if reason := self._reason_to_skip(check, scene.subject):
            verdict = Verdict(check.id, "skipped", reason)
        else:
            verdict = await self._verdict(check, scene, started)
        self._verdicts.append(verdict)
        self._plan.on_verdict(verdict)

    def _reason_to_skip(self, check: Check, subject: Subject) -> str:
        if check.needs == "killable" and not subject.killable:
            return "the kit did not start the subject, so it can't kill it"
        if check.keyed is not None and check.keyed != bool(self._plan.cluster_key):
            return "needs a cluster key" if check.keyed else "needs a cluster without a key"
        listed = subject.record.get("features")
        lacking = [each for each in check.features if listed is not None and each not in listed]
        if lacking:
            return f"its record does not list the feature {lacking[0]}"
        missing = [claim for claim in check.claims if not subject.record.get(claim)]
        return f"its record has no {missing[0]}" if missing else ""

    async def _verdict(self, check: Check, scene: _Scene, started: float) -> Verdict:
        subject = scene.subject

        def ended(status: str, reason: str = "") -> Verdict:
            return Verdict(check.id, status, reason, time.monotonic() - started)  # type: ignore[arg-type]

        async with AsyncExitStack() as stack:
            context = CheckContext(
                check.id,
                subject,
                self._sockets,
                self._plan.seed,
                scene.metadata_server,
                stack,
                self._plan.answer_s,
            )
            try:
                await asyncio.wait_for(check.run(context), _CHECK_S)
            except CheckSkipped as skipped:
                return ended("skipped", str(skipped))
            except CheckFailed as failed:
                return ended("failed", str(failed) + _died(subject))
            except TimeoutError:
                return ended("failed", f"not over within {_CHECK_S:g} s{_died(subject)}")
            except (HungUp, ConnectionError) as error:
                return ended("failed", f"hung up: {error!r}{_died(subject)}")
            except CaseError:
                raise
            except (KeyError, IndexError, TypeError, ValueError) as error:
                return ended("failed", f"an answer lacks something: {error!r}{_died(subject)}")
        return ended("passed")


async def _all_of(tasks: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all of these; when one raises, cancel the others and raise that."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _died(subject: Subject) -> str:
    if subject.process is None or subject.process.running:
        return ""
    return (
        f". The subject's process ended with status {subject.process.exit_status}; "
        f"its output ends with:\n    {subject.process.last_lines()}"
    )


def default_jobs() -> int:
    """Return how many shared checks run at the same time: most of them wait for deadlines."""
    return 16 * (os.cpu_count() or 1)
