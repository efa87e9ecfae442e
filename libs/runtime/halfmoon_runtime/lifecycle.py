"""Run a service's process from start to stop, and report its stages.

    starting ──ready()──► serving ──signal──► stopping (main finishes what it has) ──► exit 0
        └──signal: main is cancelled──────────────────────────────────────────────────► exit 0
    a task fails: the others are cancelled, the traceback is logged ────────────────► exit 1
    a task raises the error `lost` of `run_service`: as above, but one line is logged ──► exit 1
    likewise `Superseded`, when a later start took this worker's name ───────────────► exit 1
    main raises CannotStart: one line is logged, without a traceback ───────────────► exit 2
                             and where another start may succeed ───────────────────► exit 1
    a second signal: main is cancelled where it is ─────────────────────► exit 128 + signal
    a third one: the process ends at once

Signals within a second are one: a service manager signals a group and its leader passes that on.

Every task has a parent. Tasks that `Service.spawn` starts belong to the process's task group: they
end with it, and their failure ends it.
"""

import asyncio
import json
import logging
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop
from prometheus_client import disable_created_metrics

from halfmoon_metadata.whole_file import replace_file
from halfmoon_runtime.gc_tuning import tune_gc
from halfmoon_runtime.healthcheck import STATUS_FILE
from halfmoon_runtime.host_check import hosts_to_check
from halfmoon_runtime.membership import Superseded
from halfmoon_runtime.observability.logs import configure_logging
from halfmoon_runtime.observability.loop_lag import LoopLagMonitor
from halfmoon_runtime.observability.metrics import expose_metrics
from halfmoon_runtime.observability.operator_http import OperatorHttp
from halfmoon_runtime.observability.operator_tokens import operator_tokens
from halfmoon_runtime.server_tls import BadTlsFiles, date_problem, server_context
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_runtime.task_errors import leaf_errors

_log = structlog.get_logger(__name__)
#: Seconds in which a further signal to stop says nothing new.
SAME_SIGNAL_S = 1.0


class CannotStart(Exception):
    """The settings ask for something that can't be served, such as a broken model.

    The text is one line for the user: it names the thing and the way out. The status file holds
    it as `error`, beside `refused` unless it may pass.
    """

    def __init__(self, text: str, *, may_pass: bool = False) -> None:
        """Create the error; `may_pass` says that another start may succeed, as with a port."""
        super().__init__(text)
        self.may_pass = may_pass


@contextmanager
def cannot_start_on(
    kinds: type[Exception] | tuple[type[Exception], ...], about: str = "", *, may_pass: bool = False
) -> Iterator[None]:
    """Turn errors of these kinds into `CannotStart`.

    Args:
        kinds: of errors that a user's settings or machine lead to.
        about: the setting and its value, before the error's own text.
        may_pass: see `CannotStart`.
    """
    try:
        yield
    except kinds as error:
        text = getattr(error, "strerror", None) or str(error)
        raise CannotStart(f"{about}: {text}" if about else text, may_pass=may_pass) from error


def report_stage(stage: str, **fields: object) -> None:
    """Log the stage that the service has reached, and write it to the status file.

    `STATUS_FILE` names the file, if set. It holds one JSON object of the stage, the process id and
    the fields, and is replaced whole.

    Args:
        stage: a word such as "loading" or "ready".
        fields: further plain values to report.
    """
    _log.info(stage, **fields)
    _write_status(stage, **fields)


def _write_status(stage: str, **fields: object) -> None:
    target = os.environ.get(STATUS_FILE)
    if not target:
        return
    status = json.dumps({"stage": stage, "pid": os.getpid(), **fields}, default=str)
    try:
        replace_file(Path(target), status.encode(), durable=False)
    except OSError as error:
        _log.warning("status file can't be written", path=target, error=str(error))


class Service:
    """Give a service's main coroutine its tasks, its HTTP server and the signal to stop."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        http: OperatorHttp | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        on_ready: Callable[[], None] | None = None,
        lost: type[Exception] | None = None,
        notes: Mapping[str, object] | None = None,
    ) -> None:
        """Make a service whose spawned tasks belong to `tasks`.

        Args:
            tasks: the process's task group.
            http: HTTP server for operators.
            tls: what the service's HTTP ports serve TLS with; None: HTTP in the clear.
            on_ready: called once, when main has built everything.
            lost: see `run_service`.
            notes: fields that each stage is reported with.
        """
        self._lost = lost
        self._notes = dict(notes or {})
        self._tasks = tasks
        self._on_ready = on_ready
        #: HTTP server for operators; None if the settings turn it off.
        self.http = http
        #: What the service's HTTP ports serve TLS with; None: HTTP in the clear.
        self.tls = tls
        #: URL of that server, once it listens.
        self.operators: str | None = None
        #: The stage that was last reported, and its fields.
        self._reported: tuple[str, dict[str, object]] = ("starting", {})
        self._problem = ""
        self._spawned: set[asyncio.Task[Any]] = set()
        self._ready = False
        #: Set at the first signal. Main then finishes what it has and returns.
        self.stopping = asyncio.Event()
        #: How late the process's event loop runs its tasks.
        self.lag = LoopLagMonitor()

    @property
    def is_ready(self) -> bool:
        """True while the service takes work: it has started and was not told to stop."""
        return self._ready and not self.stopping.is_set()

    def ready(self) -> None:
        """Mark the service as started: from now on a signal lets main finish, not cancels it."""
        if self._on_ready is not None:
            self._on_ready()
            self._on_ready = None
        self._ready = True

    def starting(self) -> None:
        """Mark the service as starting again, until `ready`: a signal cancels main meanwhile."""
        self._ready = False

    def report_stage(self, stage: str, **fields: object) -> None:
        """Report a stage as the function `report_stage` does, with the URL for operators."""
        where = {} if self.operators is None else {"operators": self.operators}
        self._reported = (stage, {**where, **self._notes, **fields})
        report_stage(stage, **self._reported[1])

    def report_problem(self, problem: str) -> None:
        """Add a problem to the reported stage and to `/health`; "" takes it away.

        The service goes on: the problem is not its own to solve.
        """
        if problem == self._problem:
            return
        self._problem = problem
        stage, fields = self._reported
        _write_status(stage, **fields, **({"problem": problem} if problem else {}))
        if self.http is not None:
            self.http.problem = problem

    def spawn(
        self, coroutine: Coroutine[Any, Any, Any], name: str | None = None
    ) -> "asyncio.Task[Any]":
        """Run a task until main has returned; then cancel it.

        Its failure ends the service. A failure while the service stops, for example because its
        sockets are being closed, is only logged, unless it is `lost`.
        """
        task = self._tasks.create_task(self._guard(coroutine), name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    @asynccontextmanager
    async def running(self, coroutine: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
        """Run a task for the length of a block; the task has ended when the block is left.

        Use it for a task that must end before its resources are closed.
        """
        task = self.spawn(coroutine)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _guard(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await coroutine
        except Exception as error:
            if not self.stopping.is_set() or _find(self._lost, error):
                raise
            _log.warning("a task failed while stopping", exc_info=True)
            return None

    def cancel_spawned(self) -> None:
        """Cancel the spawned tasks, after main has returned."""
        for task in self._spawned:
            task.cancel()


def run_service(
    name: str,
    settings: ServiceSettings,
    main: Callable[[Service], Coroutine[Any, Any, None]],
    *,
    lost: type[Exception] | None = None,
) -> NoReturn:
    """Run a service until it has stopped, then exit the process.

    The event loop is uvloop's, which halves the cost of sockets and wake-ups.

    Args:
        name: name of the service in logs.
        settings: configures logs and metrics.
        main: builds and runs the service. It returns some time after `Service.stopping` is set,
            or raises.
        lost: error after which the process can't go on through no fault of its own; it is logged
            as one line.
    """
    # Files that the service makes are its user's alone: journals, disk tiers, sockets.
    os.umask(0o077)
    configure_logging(name, settings.worker_id, settings.log_level, settings.log_format)
    report_stage("starting", worker_id=settings.worker_id)
    misspelt = settings.misspelt_variables()
    for variable, meant in misspelt.items():
        _log.warning("no setting", variable=variable, advice=f"did you mean {meant}?")
    if addresses := settings.open_addresses:
        _log.warning(
            "open network",
            **addresses,
            advice="there is no cluster key: each process that reaches these ports is trusted",
        )
    # Each record has them: its reader may come late, and sees the latest one only.
    run = _Run(settings, main, lost, {"misspelt": misspelt} if misspelt else {})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exit_now(runner.run(run.run_until_exit()))


def exit_now(code: int) -> NoReturn:
    """End the process without Python's own clean-up; what was logged and printed is written.

    Main has closed everything by then. Python's clean-up would wait for threads that can't be
    cancelled, such as one that loads a model or calls a metadata server. It would then take apart
    torch's modules for over a second of processor time.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()
    os._exit(code)


class _Run:
    """Run a service once, and handle its signals."""

    def __init__(
        self,
        settings: ServiceSettings,
        main: Callable[[Service], Coroutine[Any, Any, None]],
        lost: type[Exception] | None,
        notes: Mapping[str, object],
    ) -> None:
        self._settings = settings
        self._main = main
        self._lost = lost
        self._notes = notes
        self._service: Service | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._n_signals = 0
        #: When the last signal came that was counted.
        self._signalled_s = -inf
        #: Exit status if nothing failed.
        self._code = 0

    async def run_until_exit(self) -> int:
        """Run the service and return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._run_main()
        except BaseException as failure:
            reasons = leaf_errors(failure)
            refusals = [reason for reason in reasons if isinstance(reason, CannotStart)]
            if refusals:
                fields = {"worker_id": self._settings.worker_id, "error": str(refusals[0])}
                _log.error("failed", **fields)
                _write_status("failed", **fields, **self._notes, refused=not refusals[0].may_pass)
                return 1 if refusals[0].may_pass else 2
            for loss in dict.fromkeys(_find(self._lost, failure)):
                _log.critical("lost", error=loss, advice="the process ends: start it again")
            for loss in dict.fromkeys(_find(Superseded, failure)):
                _log.critical("superseded", error=loss)
            told = (Superseded,) if self._lost is None else (Superseded, self._lost)
            for reason in reasons:
                if not isinstance(reason, told):
                    _log.error("service failed", exc_info=reason)
            texts = dict.fromkeys(_text(reason) for reason in reasons)
            self._report_stage("failed", error="; ".join(texts))
            return 1
        self._report_stage("stopped")
        return self._code

    async def _run_main(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._service = self._open_service(tasks)
            lag = self._service.lag
            hide = expose_metrics(lag.metrics)
            self._service.spawn(lag.watch(), name="loop lag")
            self._service.spawn(_warn_if_unresolved(self._settings.advertise_host))
            self._main_task = tasks.create_task(self._main(self._service), name="main")
            await asyncio.wait({self._main_task})
            hide()
            self._service.cancel_spawned()

    def _on_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._signalled_s + SAME_SIGNAL_S:
            return
        self._signalled_s = now
        self._n_signals += 1
        _log.info("signal", signal=number.name, n=self._n_signals)
        if self._n_signals >= 3:
            exit_now(128 + number)
        if self._service is None or self._main_task is None:
            return
        is_starting = not self._service.is_ready
        self._service.stopping.set()
        if self._n_signals == 2:
            self._code = 128 + number
        if is_starting or self._n_signals == 2:
            self._main_task.cancel()

    def _open_service(self, tasks: asyncio.TaskGroup) -> Service:
        """Return the service, with an HTTP server for operators unless the settings turn it off."""
        settings = self._settings
        tls = _open_tls(settings)
        if settings.metrics_port < 0:
            return Service(tasks, tls=tls, on_ready=tune_gc, lost=self._lost, notes=self._notes)
        key = settings.cluster_key.get_secret_value()
        http = OperatorHttp(
            asyncio.get_running_loop(),
            lambda: service.is_ready,
            tokens=operator_tokens(key),
            hosts=hosts_to_check(settings, tls, has_keys=bool(key)),
            tls=tls,
        )
        service = Service(
            tasks, http, tls=tls, on_ready=tune_gc, lost=self._lost, notes=self._notes
        )
        with cannot_start_on(OSError, may_pass=True):
            http.start(settings.metrics_port, settings.host)
        service.operators = http.url(settings.host)
        # Otherwise each counter gets a second time series with the time of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        _log.info("metrics", url=f"{service.operators}/metrics")
        return service

    def _report_stage(self, stage: str, **fields: object) -> None:
        report_stage(stage, worker_id=self._settings.worker_id, **self._notes, **fields)


async def _warn_if_unresolved(advertise_host: str) -> None:
    """Log a name that peers are to dial and that means nothing here: it may be misspelt.

    It is not refused: peers may know names that this machine does not.
    """
    if not advertise_host:
        return
    try:
        await asyncio.get_running_loop().getaddrinfo(advertise_host, None)
    except (OSError, UnicodeError) as error:
        _log.warning(
            "advertise_host",
            advertise_host=advertise_host,
            problem=f"the name does not resolve on this machine: {error}",
            advice="peers dial it: check --advertise-host (HALFMOON_ADVERTISE_HOST)",
        )


def _open_tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    """Return what the service's HTTP ports serve TLS with; None without a certificate.

    Raises:
        CannotStart: the files can't be used.
    """
    if not settings.tls_cert:
        return None
    try:
        context = server_context(settings.tls_cert, settings.tls_key)
    except BadTlsFiles as error:
        raise CannotStart(str(error)) from None
    if problem := date_problem(settings.tls_cert, context):
        _log.warning("certificate", tls_cert=settings.tls_cert, problem=problem)
    return context


def _find(kind: type[Exception] | None, failure: BaseException) -> list[str]:
    """Return the texts of the exceptions of a kind in a failure."""
    if kind is None:
        return []
    return [str(leaf) for leaf in leaf_errors(failure) if isinstance(leaf, kind)]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
