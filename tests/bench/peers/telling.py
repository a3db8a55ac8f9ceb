"""Events of a contestant, for the process that has started it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Teller:
    """JSON lines on what was stdout. From here on that is stderr: DeepSpeed prints there, as do the
    compilers that it calls."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def __call__(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.monotonic(), **values}
        print(json.dumps(line), file=self._file, flush=True)
