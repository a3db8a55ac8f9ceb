"""The form of the log: one event a line, whoever writes it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from memd import holder
from memd.log import JsonFormatter, TextFormatter

AWKWARD = {"job": 'gpt"2', "reason": "a\nb", "path": "/x=y z", "none": "", "word": "µs", "count": 7}


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_holder_writes_the_same_lines_as_the_daemon(log_format: str) -> None:
    # It cannot import the daemon's modules, so that its own code must agree with theirs.
    record = logging.makeLogRecord(
        {"levelname": "ERROR", "levelno": 40, "msg": "it is lost", "name": "memd.holder", **AWKWARD}
    )
    formatter = JsonFormatter() if log_format == "json" else TextFormatter({})
    expected = formatter.format(record)
    values = {"time": json.loads(JsonFormatter().format(record))["time"], "level": "error"}
    values |= {"event": "it is lost", "logger": "memd.holder", **AWKWARD}
    assert holder.line_of(values, log_format=log_format) == expected
    assert "\n" not in expected


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_that_nobody_catches_is_one_line(log_format: str) -> None:
    program = f"""
import threading
from memd import log
log.configure(log_format={log_format!r}, log_level="info")
log.tell_uncaught_errors()
def fails():
    raise ValueError("in a thread")
thread = threading.Thread(target=fails, name="worker")
thread.start()
thread.join()
raise ValueError("in the process")
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    of_thread, of_process = answer.stderr.splitlines()
    assert "in a thread" in of_thread
    assert "worker" in of_thread
    assert "in the process" in of_process
    if log_format == "json":
        assert {json.loads(line)["level"] for line in (of_thread, of_process)} == {"critical"}
