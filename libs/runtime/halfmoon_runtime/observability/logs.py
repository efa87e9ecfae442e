"""Write structured logs with request ids."""

import logging
import os
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]

#: Libraries that log every request or frame at "info".
_TALKATIVE = ("httpx", "httpcore", "uvicorn.access", "asyncio", "urllib3", "filelock")


def configure_logging(
    service: str, worker_id: str, level: LogLevel = "info", format: LogFormat = "console"
) -> None:
    """Write all log lines, those of libraries too, to standard error.

    Args:
        service: name of the service, on every line of the JSON format.
        worker_id: name of the process, on every line.
        level: least severe lines to write.
        format: "console" for text, "json" for one object a line.
    """
    if format == "json" or not sys.stderr.isatty():
        # Bars of progress of huggingface_hub and transformers, which read it when imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if format == "json":
        final: list[Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    else:
        final = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(worker_id=worker_id)
    if format == "json":
        structlog.contextvars.bind_contextvars(service=service)


def bind_request(request_id: str) -> None:
    """Add the request's id to every log line of the current task and of tasks it starts."""
    structlog.contextvars.bind_contextvars(request_id=request_id)
