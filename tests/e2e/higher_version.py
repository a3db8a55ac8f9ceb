"""The same files as the next version: whatever differs after the upgrade, the upgrade did."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = re.compile(r'(?m)^__version__ = "(.+)"$')


def after(version: str) -> str:
    first, _, last = version.rpartition(".")
    return f"{first}.{int(last) + 1}"


def raise_module(text: str) -> str:
    """The text of memd/__init__.py."""
    return _VERSION.sub(lambda found: f'__version__ = "{after(found[1])}"', text)


def raise_wheel(wheel: Path, folder: Path) -> Path:
    name, version, *tags = wheel.name.split("-")
    higher = after(version)
    raised = folder / "-".join((name, higher, *tags))
    before, now = (f"{name}-{each}.dist-info/" for each in (version, higher))
    line = f"\nVersion: {higher}\n".encode()
    record = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(raised, "w") as target:
        for member in source.infolist():
            data = source.read(member)
            member.filename = member.filename.replace(before, now)
            if member.filename == now + "RECORD":
                continue
            if member.filename == f"{name}/__init__.py":
                data = raise_module(data.decode()).encode()
            elif member.filename == now + "METADATA":
                data = data.replace(f"\nVersion: {version}\n".encode(), line, 1)
            target.writestr(member, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record.append(f"{member.filename},sha256={digest},{len(data)}")
        target.writestr(now + "RECORD", "\n".join([*record, f"{now}RECORD,,", ""]))
    return raised
