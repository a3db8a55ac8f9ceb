"""The committed protobuf code is what the .proto files give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from memd_proto.v1 import attach_pb2, session_pb2

ROOT = Path(__file__).parents[2]


def texts_below(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py*")
        if "__pycache__" not in path.parts
    }


def test_committed_code_is_what_the_proto_files_give(tmp_path: Path) -> None:
    script = ROOT / "proto" / "regenerate.py"
    subprocess.run([sys.executable, script, "--to", tmp_path / "memd_proto"], check=True)
    committed = texts_below(ROOT / "proto" / "memd_proto")
    assert len(committed) > 10
    assert texts_below(tmp_path / "memd_proto") == committed, "run `make regenerate`"


def test_descriptors_keep_the_names_of_the_protocol() -> None:
    assert attach_pb2.DESCRIPTOR.name == "memd/v1/attach.proto"
    service = session_pb2.DESCRIPTOR.services_by_name["SessionService"]
    assert service.full_name == "memd.v1.SessionService"
