"""Writes the type stub of the compiled module, which is committed so that readers and type checkers
see it without a build.

Run: python native/python/regenerate_stub.py [--check]   (memd installed)
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "native/python/memd_native/_core.pyi"
PATTERNS = ROOT / "native/bind/stub.pat"


def generate() -> str:
    """The stub of the module as it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "_core.pyi"
        command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "memd_native._core"]
        subprocess.run([*command, "-p", str(PATTERNS), "-o", str(stub)], check=True)
        return stub.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the stub is stale")
    arguments = parser.parse_args()
    generated = generate()
    if arguments.check:
        return int(STUB.read_text() != generated)
    STUB.write_text(generated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
