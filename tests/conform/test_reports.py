"""What a run of the kit leaves for programs: exit statuses, JSON, JUnit, known failures, --list."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from halfmoon_conform.catalogue import all_checks, checks_of
from halfmoon_conform.check import ServiceRole
from halfmoon_conform.report.documents import as_json, as_junit
from halfmoon_conform.report.known_failures import UnknownCheck, read_known_failures
from halfmoon_conform.subject.conductor_subject import ConductorSubject, free_port
from halfmoon_conform.subject.metadata_server import MetadataServer
from halfmoon_conform.subject.subject import Subject, SubjectProcess, fill_in
from halfmoon_conform.verdict import Verdict
from tests.conform.planted_runs import FAULTS, service_command
from tests.programs import run_program

BY_ID = {check.id: check for check in all_checks()}
PASSED, FAILED, SKIPPED, KNOWN, UNEXPECTED = checks_of("kvstore", ("kvstore.put.*",))[:5]
VERDICTS = [
    Verdict(PASSED.id, "passed", "", 1.25),
    Verdict(FAILED.id, "failed", 'said <no> & "never"\x00\x1b\udcff', 0.5),
    Verdict(SKIPPED.id, "skipped", "its record has no replicates", 0.0),
    Verdict(KNOWN.id, "known", "not over within 180 s", 180.0),
    Verdict(UNEXPECTED.id, "unexpected_pass", "", 0.25),
]

#: A check that a planted fault makes fail, and one that the same service passes.
HIT, SOUND = "worker.hello.answered-by-welcome", "worker.versions.no-common-one"


# -- documents -------------------------------------------------------------------------------------


def test_the_json_document_has_each_verdict_its_sentence_and_the_counts() -> None:
    document = json.loads(as_json(VERDICTS, BY_ID, "kvstore"))
    assert document["service"] == "kvstore"
    assert document["counts"] == {
        "passed": 1, "failed": 1, "skipped": 1, "known": 1, "unexpected_pass": 1
    }  # fmt: skip
    assert [(row["id"], row["status"]) for row in document["checks"]] == [
        (verdict.check_id, verdict.status) for verdict in VERDICTS
    ]
    assert document["checks"][0]["seconds"] == 1.25
    assert document["checks"][0]["says"] == " ".join(PASSED.says.split())
    assert document["checks"][1]["reason"] == 'said <no> & "never"\x00\x1b?'
    assert document["checks"][2]["reason"] == "its record has no replicates"


def test_the_junit_document_is_well_formed_and_counts_as_junit_does() -> None:
    suite = ElementTree.fromstring(as_junit(VERDICTS, BY_ID, "kvstore"))
    assert suite.tag == "testsuite"
    counted = {name: suite.get(name) for name in ("tests", "failures", "skipped", "time")}
    assert counted == {"tests": "5", "failures": "2", "skipped": "2", "time": "182.000"}
    inside = {case.get("name"): [part.tag for part in case] for case in suite.iter("testcase")}
    assert inside == {
        PASSED.id: [], FAILED.id: ["failure"], SKIPPED.id: ["skipped"], KNOWN.id: ["skipped"],
        UNEXPECTED.id: ["failure"],
    }  # fmt: skip
    (failure, _) = suite.iter("failure")
    assert failure.get("message") == 'said <no> & "never"???'
    assert failure.text == f"the protocol says: {' '.join(FAILED.says.split())}"


# -- known failures --------------------------------------------------------------------------------


def test_the_file_of_known_failures_may_have_comments_and_no_unknown_id() -> None:
    assert read_known_failures("# ours\n\n a  # slow\nb\n", "abc") == {"a", "b"}
    with pytest.raises(UnknownCheck, match=r"no check d, e: .*--list"):
        read_known_failures("e\na\nd\n", "abc")


# -- the command -----------------------------------------------------------------------------------


def conform(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **(environment or {})}
    return run_program("halfmoon_cli", "conform", *arguments, timeout_s=280, env=env)


@pytest.mark.parametrize("role", ["", "conductor"])
def test_list_shows_the_checks_of_a_role_or_of_all(role: str) -> None:
    listed = conform(*([role] if role else []), "--list")
    assert listed.returncode == 0
    wanted = checks_of("conductor") if role else all_checks()
    lines = listed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [check.id for check in wanted]
    assert lines[0].endswith(f"{','.join(wanted[0].roles)}: {' '.join(wanted[0].says.split())}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kvstores", "--", "true"], "no service 'kvstores': it is one of kvstore,"),
        (["kvstore", "--only", "no.such.*", "--", "true"], "no check of kvstore matches --only"),
        (["kvstore", "--only", HIT], "say how to start the service, behind --"),
        (["conductor", "--metadata", "http://127.0.0.1:1/metadata"], "a conductor with --url"),
        (["kvstore", "--only", HIT, "--", "false"], "the command ended with status 1"),
    ],
)
def test_the_status_is_2_where_no_run_could_be_made(arguments: list[str], said: str) -> None:
    ran = conform(*arguments)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_the_status_is_2_where_a_known_failure_is_no_check(tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text("no.such.check\n")
    ran = conform("kvstore", "--known-failures", str(known), "--", "true")
    assert ran.returncode == 2
    assert f"{known}: no check no.such.check" in ran.stderr


@pytest.mark.e2e
def test_status_and_documents_tell_of_failures_known_or_not(tmp_path: Path) -> None:
    planted, known = tmp_path / "fault.json", tmp_path / "known"
    reports = {"--json": tmp_path / "run.json", "--junit": tmp_path / "run.xml"}

    def run(fault: bool, *options: str) -> tuple[int, str, list[str], tuple[str | None, ...]]:
        """Return the status, the lines, the checks' statuses, and JUnit's counts."""
        planted.write_text(json.dumps(FAULTS[HIT]) if fault else "")
        files = [part for name, file in reports.items() for part in (name, str(file))]
        ran = conform(
            "kvstore", "--only", HIT, "--only", SOUND, *files, *options, "--",
            *service_command("kvstore", faulty=True),
            environment={"HALFMOON_PLANTED_FAULT": str(planted)},
        )  # fmt: skip
        assert ran.returncode in (0, 1), ran.stdout + ran.stderr
        rows = json.loads(reports["--json"].read_text())["checks"]
        suite = ElementTree.parse(reports["--junit"]).getroot()
        assert [row["id"] for row in rows] == [HIT, SOUND]
        counts = tuple(suite.get(name) for name in ("tests", "failures", "skipped"))
        return ran.returncode, ran.stdout, [row["status"] for row in rows], counts

    status, lines, statuses, counts = run(True)
    assert (status, statuses, counts) == (1, ["failed", "passed"], ("2", "1", "0"))
    assert f"FAIL  {HIT}" in lines and " ".join(BY_ID[HIT].says.split()) in lines
    assert "1 passed, 1 failed of 2 checks" in lines

    known.write_text(f"{HIT}  # it says another name\n")
    status, lines, statuses, counts = run(True, "--known-failures", str(known))
    assert (status, statuses, counts) == (0, ["known", "passed"], ("2", "0", "1"))
    assert f"known {HIT}" in lines

    status, lines, statuses, counts = run(False, "--known-failures", str(known))
    assert (status, statuses, counts) == (1, ["unexpected_pass", "passed"], ("2", "1", "0"))
    assert f"PASS? {HIT}" in lines


# -- services that run already ---------------------------------------------------------------------


@contextmanager
def running(role: ServiceRole, folder: Path) -> Iterator[tuple[Subject, MetadataServer, int]]:
    """A service of ours, registered at a metadata server; and the port it was given."""
    server, port = MetadataServer(), free_port()
    values = {"metadata": server.url, "worker_id": f"{role}-7", "port": str(port)}
    process = SubjectProcess(fill_in(service_command(role), values), {}, folder / f"{role}.log")
    subject = (
        ConductorSubject(f"http://127.0.0.1:{port}", server.store, process=process)
        if role == "conductor"
        else Subject(f"{role}-7", server.store, process=process)
    )
    try:
        asyncio.run(subject.start())
        yield subject, server, port
    finally:
        asyncio.run(process.kill())
        server.close()


@pytest.mark.e2e
def test_a_running_worker_is_tested_again_and_again_and_not_killed(tmp_path: Path) -> None:
    only = [HIT, "kvstore.put.uncommitted-is-not-served", "kvstore.restart.old-keys-are-void"]
    with running("kvstore", tmp_path) as (subject, server, _):
        where = ["--metadata", server.url, "--worker-id", subject.worker_id]
        ran = conform("kvstore", *where, *(f"--only={each}" for each in only), "--json", "-")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        # Nothing but the document is printed: the lines go to stderr.
        found = {row["id"]: row for row in json.loads(ran.stdout)["checks"]}
        assert [found[each]["status"] for each in only] == ["passed", "passed", "skipped"]
        assert found[only[2]]["reason"].endswith("so it can't kill it")
        assert f"ok    {HIT}" in ran.stderr
        assert subject.process is not None and subject.process.running
        generation = subject.generation
        assert asyncio.run(subject.read_record()) is not None
        assert subject.generation == generation
        # That it was used before fails no check of counts.
        counts = ["--only=kvstore.load.*", "--only=kvstore.layout.of-registered-workers"]
        ran = conform("kvstore", *where, *counts, "--json", "-")
        assert ran.returncode == 0, ran.stderr
        again = {row["id"]: row for row in json.loads(ran.stdout)["checks"]}
        assert again["kvstore.load.counts"]["reason"] == "it has a layout already"
        assert again["kvstore.load.missing-behind"]["reason"] == "it has a layout already"
        members = subject.store.list("halfmoon/members/")
        assert [*members] == [f"halfmoon/members/{subject.worker_id}"]


@pytest.mark.e2e
def test_a_running_conductor_is_tested_by_its_url(tmp_path: Path) -> None:
    only = ["conductor.hello.first", "conductor.request.stream", "conductor.request.hashes"]
    with running("conductor", tmp_path) as (subject, server, port):
        where = ["--metadata", server.url, "--url", f"http://127.0.0.1:{port}"]
        ran = conform("conductor", *where, *(f"--only={each}" for each in only))
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert all(f"ok    {each}" in ran.stdout for each in only), ran.stdout
        assert subject.process is not None and subject.process.running
