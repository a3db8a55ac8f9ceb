"""Checks a wheel of memd for what auditwheel does not know: its tags and its one module.

Run: python deploy/wheels/check.py WHEEL…   (pyelftools installed)
Prints what is wrong, and exits with 1 where something is.
"""

from __future__ import annotations

import re
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elftools.elf.elffile import ELFFile

if TYPE_CHECKING:
    from collections.abc import Iterator

GLIBC_NEWEST = (2, 28)
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# glibc's own, which every system of its age has; all else is linked in.
LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
ENTRY = "PyInit__core"
_NAME = re.compile(
    r"memd-[\w.]+-(?P<tag>(?P<abi>cp311-cp311|cp312-abi3)-manylinux_2_28_(?P<machine>\w+))\.whl"
)
_VERSION = re.compile(r"GLIBC_(\d+(?:\.\d+)*)")


def faults(wheel: Path) -> Iterator[str]:
    name = _NAME.fullmatch(wheel.name)
    if name is None or name["machine"] not in MACHINES:
        yield "the name is not that of a wheel for manylinux_2_28 and CPython 3.11, or 3.12 on"
        return
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = [each for each in names if each.endswith(".dist-info/WHEEL")]
        tags = re.findall(r"^Tag: (.+?)\s*$", archive.read(record).decode(), re.MULTILINE)
        if tags != [name["tag"]]:
            yield f"the tags in it are {tags}, not {name['tag']}"
        suffix = f"cpython-311-{name['machine']}-linux-gnu" if "cp311" in name["abi"] else "abi3"
        module = f"memd_native/_core.{suffix}.so"
        binaries = [each for each in names if ".so" in Path(each).suffixes]
        if binaries != [module]:
            yield f"its compiled files are {binaries}, not {module} alone"
            return
        yield from module_faults(archive.read(module), name["machine"])


def module_faults(module: bytes, machine: str) -> Iterator[str]:
    file: Any = ELFFile(BytesIO(module))
    if file["e_machine"] != MACHINES[machine]:
        yield f"the module is for {file['e_machine']}"
    tags = list(file.get_section_by_name(".dynamic").iter_tags())
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    if others := needed - LIBRARIES - LOADERS:
        yield f"it needs libraries that are not glibc's: {', '.join(sorted(others))}"
    for tag in tags:
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield f"it looks for libraries in {getattr(tag, 'rpath', getattr(tag, 'runpath', ''))}"
    newer = sorted({version for version in versions(file) if _is_newer(version)})
    if newer:
        yield f"it needs symbols that glibc 2.28 does not have: {', '.join(newer)}"
    exported = {
        symbol.name
        for symbol in file.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    }
    # Another library of the process, such as torch, would take them for its own.
    if others := exported - {ENTRY}:
        yield f"it exports {len(others)} symbols beside {ENTRY}: {', '.join(sorted(others)[:5])}"
    if ENTRY not in exported:
        yield f"it does not export {ENTRY}"


def versions(file: Any) -> Iterator[str]:
    """Versions of the symbols that it needs, such as GLIBC_2.14."""
    needs = file.get_section_by_name(".gnu.version_r")
    for _, of_library in needs.iter_versions() if needs else ():
        for version in of_library:
            yield version.name


def _is_newer(version: str) -> bool:
    match = _VERSION.fullmatch(version)
    return match is None or tuple(map(int, match[1].split("."))) > GLIBC_NEWEST


def main() -> int:
    status = 0
    for wheel in map(Path, sys.argv[1:]):
        found = list(faults(wheel))
        for each in found:
            print(f"{wheel}: {each}", file=sys.stderr)
        if found:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
