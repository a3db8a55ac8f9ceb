"""The committed type stub is what the compiled module says of itself."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_type_stub_is_that_of_the_compiled_module() -> None:
    script = ROOT / "native/python/regenerate_stub.py"
    checked = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert checked.returncode == 0, "the stub is stale; run `make regenerate` and commit it"
