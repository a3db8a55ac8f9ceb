"""Logs to stderr, one event a line: a sentence and its values, given as `extra`."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memd_native import set_check_format

if TYPE_CHECKING:
    from collections.abc import Mapping

# Attributes of every record; the rest are the event's values.
_RECORD_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
# syslog's severities, which sd-daemon(3) reads from the start of a line.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def configure(*, log_format: str, log_level: str) -> None:
    """Replaces what was configured before. Libraries log through the same handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=log_level.upper(), force=True)
    set_check_format(log_format, to_journal=_is_to_journal(os.environ))


def tell_uncaught_errors() -> None:
    """An error that ends a thread or the process is an event too: one line with its traceback."""
    log = logging.getLogger("memd")

    def tell_of_process(*error: Any) -> None:
        log.critical("ended by an error that is a bug", exc_info=error)

    def tell_of_thread(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        log.critical(
            "a thread ended by an error that is a bug",
            extra={"thread_name": arguments.thread.name if arguments.thread else "unknown"},
            exc_info=error,
        )

    sys.excepthook = tell_of_process
    threading.excepthook = tell_of_thread


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_values(record, self), default=str)


class TextFormatter(logging.Formatter):
    """logfmt, with the priority in front where the journal reads it."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self._to_journal = _is_to_journal(environ)

    def format(self, record: logging.LogRecord) -> str:
        values = _values(record, self)
        line = " ".join(f"{name}={_quoted(value)}" for name, value in values.items())
        return f"<{_PRIORITIES[record.levelname]}>{line}" if self._to_journal else line


def _is_to_journal(environ: Mapping[str, str]) -> bool:
    return "JOURNAL_STREAM" in environ


def _values(record: logging.LogRecord, formatter: logging.Formatter) -> dict[str, Any]:
    values: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "event": record.getMessage(),
        "logger": record.name,
    }
    values |= {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}
    if record.exc_info:
        values["exception"] = formatter.formatException(record.exc_info)
    return values


def _quoted(value: object) -> str:
    text = str(value)
    # A name chosen by a client must not begin a line of its own.
    return text if text and text.isprintable() and not set(text) & set(' ="') else json.dumps(text)
