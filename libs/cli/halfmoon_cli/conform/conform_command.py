"""Define `halfmoon conform`: test a service of any language against the protocol."""

import random
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_conform.check import ROLES, Check, ServiceRole

if TYPE_CHECKING:
    from halfmoon_conform.run import RunPlan
    from halfmoon_conform.verdict import Verdict
    from halfmoon_metadata import MetadataStore

_EXAMPLE = "halfmoon conform kvstore -- ./my-kvstore --metadata {metadata} --name {worker_id}"
#: Status of a run in which a check failed, and of one that could not be made.
_FAILED, _UNUSABLE = 1, 2


def conform(
    service: Annotated[
        str | None,
        typer.Argument(metavar="SERVICE", help=f"What is tested: {', '.join(ROLES)}"),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="Starts the service, with {metadata}, {worker_id}, {cluster_key_file}, {port} and"
            " {folder} filled in",
        ),
    ] = None,
    metadata: Annotated[
        str, typer.Option(help="URL of a metadata server; without it the kit serves one")
    ] = "",
    worker_id: Annotated[
        str, typer.Option(help="The running worker to test, or the name of the started one")
    ] = "",
    url: Annotated[
        str, typer.Option(help="The REST API of the running conductor to test: http://host:port")
    ] = "",
    key: Annotated[
        bool,
        typer.Option(
            "--key/--no-key", help="Start the service with a cluster key that the kit makes"
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run checks whose ids match, as in 'kvstore.put.*'; may be repeated"),
    ] = None,
    known_failures: Annotated[
        Path | None, typer.Option(help="File with ids of checks that are known to fail, one a line")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the result there as JSON; - prints it")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Write the result there as JUnit's XML")
    ] = None,
    list_checks: Annotated[
        bool, typer.Option("--list", help="List all checks, or the service's, and run none")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Checks that run at the same time")] = 24,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the service's output; else it is thrown away")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of all random choices, to repeat a run")
    ] = None,
) -> None:
    """Test a service against docs/protocol.md as a black box.

    The kit starts the service by COMMAND, and may kill it and start it again. Give the service what
    it needs with placeholders: `{metadata}` is the URL of the kit's metadata server, `{worker_id}`
    the name to register under. The same is in HALFMOON_METADATA and HALFMOON_WORKER_ID.

        halfmoon conform kvstore -- ./my-kvstore --metadata {metadata} --name {worker_id}

    Without a COMMAND, a running worker is tested, and not killed:

        halfmoon conform kvstore --metadata redis://10.0.0.9:6379/0 --worker-id kvstore-0

    Each line is one check. The exit status is 0 when all pass, 1 when one fails, and 2 when the
    run could not be made.
    """
    from halfmoon_conform.catalogue import all_checks, checks_of
    from halfmoon_conform.report.known_failures import mark_known
    from halfmoon_conform.report.lines import list_lines, summary_line, verdict_line
    from halfmoon_conform.run import RunPlan

    role = _role(service, needed=not list_checks)
    if list_checks:
        wanted = list(all_checks()) if role is None else checks_of(role)
        typer.echo("\n".join(list_lines(wanted)))
        return
    assert role is not None
    chosen = checks_of(role, tuple(only or ()))
    if not chosen:
        _end(f"no check of {role} matches --only: `halfmoon conform {role} --list` lists them")
    if not command and not (metadata and (url if role == "conductor" else worker_id)):
        _end(
            f"say how to start the service, behind --:\n    {_EXAMPLE}\n"
            "or name a running one with --metadata URL --worker-id NAME, a conductor with --url URL"
        )
    known = _known(known_failures)
    seed = random.randrange(2**32) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="halfmoon-conform-") as scratch:
        folder = logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        cluster_key, key_file = _cluster_key(bool(command), key, Path(scratch))
        sentences = {check.id: check.says for check in chosen}

        def show(verdict: "Verdict") -> None:
            (marked,) = mark_known([verdict], known)
            typer.echo(verdict_line(marked, sentences[verdict.check_id]), err=_prints(json))

        plan = RunPlan(
            role=role,
            checks=chosen,
            command=tuple(command or ()),
            worker_id=worker_id or f"conform-{role}",
            store=_store(metadata, cluster_key),
            metadata_url=metadata,
            cluster_key=cluster_key,
            cluster_key_file=key_file,
            url=url,
            logs=folder,
            seed=seed,
            jobs=jobs,
            on_verdict=show,
            on_wait=lambda line: typer.echo(line, err=True),
        )
        verdicts, seconds = _run(plan)
    verdicts = mark_known(verdicts, known)
    _write(verdicts, chosen, role, json, junit)
    typer.echo(f"{summary_line(verdicts, seconds)} (--seed {seed})", err=_prints(json))
    if any(verdict.status in ("failed", "unexpected_pass") for verdict in verdicts):
        raise typer.Exit(_FAILED)


def _run(plan: "RunPlan") -> tuple[list["Verdict"], float]:
    import asyncio

    from halfmoon_conform.data_cases.case_values import CaseError
    from halfmoon_conform.subject.subject import CannotStartSubject
    from halfmoon_metadata import MetadataError

    started = time.monotonic()
    try:
        return asyncio.run(_until_stopped(plan)), time.monotonic() - started
    except asyncio.CancelledError:
        _end("stopped by SIGTERM, and with it what was started")
    except (CannotStartSubject, MetadataError, CaseError) as error:
        _end(str(error))


async def _until_stopped(plan: "RunPlan") -> list["Verdict"]:
    """Run the checks; SIGTERM ends them, and what the kit started."""
    import asyncio

    from halfmoon_conform.run import run_checks

    running = asyncio.current_task()
    assert running is not None, "a coroutine runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await run_checks(plan)


def _role(service: str | None, *, needed: bool) -> ServiceRole | None:
    for role in ROLES:
        if role == service:
            return role
    if service is None and not needed:
        return None
    given = "no service is named" if service is None else f"no service {service!r}"
    return _end(f"{given}: it is one of {', '.join(ROLES)}, as in\n    {_EXAMPLE}")


def _cluster_key(started: bool, wanted: bool, scratch: Path) -> tuple[str, str]:
    """Return the key and its file: new for a started service, else those of the environment."""
    if not started:
        return read_cluster_key(), ""
    if not wanted:
        return "", ""
    key = f"{random.SystemRandom().randrange(2**256):064x}"
    file = scratch / "cluster-key"
    file.touch(mode=0o600)
    file.write_text(key + "\n")
    return key, str(file)


def _store(url: str, cluster_key: str) -> "MetadataStore | None":
    if not url:
        return None
    from halfmoon_metadata import open_store

    try:
        return open_store(url, cluster_key=cluster_key)
    except ValueError as error:
        _end(str(error))


def _known(file: Path | None) -> frozenset[str]:
    if file is None:
        return frozenset()
    from halfmoon_conform.catalogue import all_checks
    from halfmoon_conform.report.known_failures import UnknownCheck, read_known_failures

    try:
        return read_known_failures(file.read_text(), (check.id for check in all_checks()))
    except (OSError, UnknownCheck) as error:
        _end(f"{file}: {error}")


def _write(
    verdicts: list["Verdict"], checks: list[Check], role: str, json: Path | None, junit: Path | None
) -> None:
    from halfmoon_conform.report.documents import as_json, as_junit

    by_id = {check.id: check for check in checks}
    try:
        if json is not None and _prints(json):
            typer.echo(as_json(verdicts, by_id, role).decode(), nl=False)
        elif json is not None:
            json.write_bytes(as_json(verdicts, by_id, role))
        if junit is not None:
            junit.write_bytes(as_junit(verdicts, by_id, role))
    except OSError as error:
        _end(f"can't write the result: {error}")


def _prints(json: Path | None) -> bool:
    return json is not None and str(json) == "-"


def _end(text: str) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(_UNUSABLE)
