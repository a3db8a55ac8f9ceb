"""What the documents say of the sources, checked against them.

`` `leases.cc: grant_or_wait, acquire` `` names functions and types that are defined in one file,
with or without their class. The file is named by the end of its path, as much of it as no other
shares.
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import draw_peers
from tests.unit import reference
from tests.unit.test_tidy import NATIVE_LAYERS, STORE_LAYERS, repository_files

ROOT = Path(__file__).parents[2]
OVERVIEW = ROOT / "ARCHITECTURE.md"
DECISIONS = ROOT / "docs" / "decisions"
OVERVIEW_WORDS_MAX = 2500
README_WORDS_MAX = 900
DIAGRAMS = {"flowchart", "sequenceDiagram", "stateDiagram-v2"}
# How many files each path of the overview may touch, by its heading.
PATH_FILES_MAX = {"A resident `get`": 5, "A miss": 12, "A gradient to its commit": 10}
# Folders in which a name is looked up where more than one file of the repository could be meant.
SOURCES = ("native", "memd", "client")
# A file's name ends like this: `volume.h`, `memd/attach.py`, `tests/bench/results/bench_io.json`.
FILE = r"[\w.-]+(?:/[\w.-]+)*\.(?:cc|h|py|pyi|md|json|toml|proto|sh|service|socket|yml)"
REFERENCE = re.compile(rf"`({FILE}):\s+([\w:.~]+(?:,\s+[\w:.~]+)*)`")
NAMED_FILE = re.compile(rf"`({FILE})`")


def documents() -> list[Path]:
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [OVERVIEW, *found, *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def tracked() -> tuple[str, ...]:
    return tuple(path.relative_to(ROOT).as_posix() for path in repository_files())


def find(name: str) -> Path:
    """The one file that `name` is the end of."""
    matching = [path for path in tracked() if path == name or path.endswith(f"/{name}")]
    sources = [path for path in matching if path.startswith(SOURCES)]
    chosen = sources or matching
    assert chosen, f"no file is called {name}"
    assert len(chosen) == 1, f"{name} may be any of {', '.join(chosen)}"
    return ROOT / chosen[0]


@cache
def python_names(path: Path) -> frozenset[str]:
    """`function`, `Class` and `Class.method`."""
    names: set[str] = set()

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.update({child.name, outer + child.name})
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{child.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return frozenset(names)


def without_comments(source: str) -> str:
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', '""', source)


def closing(source: str, begin: int) -> int:
    """Where the parenthesis at `begin` is closed; the end of the text where it is not."""
    depth = 0
    for at in range(begin, len(source)):
        depth += {"(": 1, ")": -1}.get(source[at], 0)
        if depth == 0:
            return at
    return len(source)


def is_defined_in_cpp(source: str, name: str) -> bool:
    """A type with a body, or a function whose head is followed by one and not by a semicolon."""
    source = without_comments(source)
    outer, _, last = name.rpartition("::")
    if re.search(rf"\b(?:class|struct|enum class) {last}\b[^;(){{]*{{", source):
        return True
    in_class = bool(outer) and re.search(rf"\b(?:class|struct) {outer}\b[^;(){{]*{{", source)
    written = last if in_class or not outer else name
    # `.lease(` and `->lease(` are calls, `Store::lease(` may be the definition.
    for found in re.finditer(rf"(?<![\w.>]){re.escape(written)}\(", source):
        line = source[source.rfind("\n", 0, found.start()) + 1 : found.start()]
        if re.search(r"\b(?:return|if|while|for|else)\b|=", line):
            continue  # a call
        after = source[closing(source, found.end() - 1) + 1 :]
        # `const noexcept -> T {`, or a constructor's initializers.
        if re.match(r"[\w\s:&*<>,-]*{|\s*:\s*\w+[({]", after):
            return True
    return False


def is_defined(path: Path, name: str) -> bool:
    if path.suffix == ".py":
        return name in python_names(path)
    return is_defined_in_cpp(path.read_text(encoding="utf-8"), name)


def slug(heading: str) -> str:
    """As code hosts make the anchor of a heading."""
    text = re.sub(r"[^\w\s-]", "", heading.strip().lower())
    return re.sub(r"\s", "-", text)


def anchors(path: Path) -> set[str]:
    text = prose(path.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def sections(path: Path) -> dict[str, str]:
    """Headings of any level, and what stands below each before the next."""
    parts = re.split(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_function_that_a_document_names_is_defined_where_it_says() -> None:
    wrong = []
    count = 0
    for document in documents():
        for file, names in REFERENCE.findall(document.read_text(encoding="utf-8")):
            for name in re.split(r",\s+", names):
                count += 1
                if not is_defined(find(file), name):
                    wrong.append(f"{document.name}: {file} defines no {name}")
    assert not wrong
    assert count >= 20


def test_every_file_that_a_document_names_is_there() -> None:
    wrong = []
    for document in documents():
        wrong += [
            f"{document.name}: {name}"
            for name in NAMED_FILE.findall(document.read_text(encoding="utf-8"))
            if not any(path == name or path.endswith(f"/{name}") for path in tracked())
        ]
    assert not wrong


def test_every_link_leads_somewhere() -> None:
    wrong = []
    for document in documents():
        text = prose(document.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("https://", "http://")):
                continue
            name, _, anchor = target.partition("#")
            path = (document.parent / name).resolve() if name else document
            is_found = path.exists() and path.is_relative_to(ROOT)
            if not is_found or (anchor and anchor not in anchors(path)):
                wrong.append(f"{document.relative_to(ROOT)}: {target}")
    assert not wrong


def test_the_reference_is_that_of_the_sources() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.generate(), "make regenerate"


def test_no_sentence_begins_as_a_translation_would() -> None:
    """Subject, verb, object: "Of what came after a step…" says it backwards."""
    words = "Of|What|Who|Whose|Whoever|Where"
    opening = re.compile(rf"(?:^|[.:;] |[|*] |- |\d\. )((?:{words})\b[^.|?]*)[.|]")
    wrong = [
        f"{document.name}: {found}"
        for document in [*documents(), ROOT / "CHANGELOG.md"]
        for found in opening.findall(" ".join(prose(document.read_text()).split()))
    ]
    assert not wrong


def test_no_comment_begins_as_a_translation_would() -> None:
    """The same of comments, and of docstrings, those of the compiled package included."""
    words = "Of|What|Who|Whose|Whoever|Whatever|Where"
    native = re.compile(rf"(?<!//)^ *///? ((?:{words})\b.*)$", re.MULTILINE)
    python = re.compile(rf'^ *(?:# |"""\n? *)((?:{words})\b.*)$', re.MULTILINE)
    wrong = []
    for name in tracked():
        folder, _, suffix = name.partition("/")[0], *name.rpartition(".")[1:]
        if folder == "native" and suffix in {"h", "cc"}:
            wrong += [f"{name}: {found}" for found in native.findall((ROOT / name).read_text())]
        elif (folder in {"memd", "client"} and suffix == "py") or suffix == "pyi":
            wrong += [f"{name}: {found}" for found in python.findall((ROOT / name).read_text())]
    assert not wrong


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS_MAX


def test_the_readmes_picture_is_that_of_the_committed_result() -> None:
    picture = draw_peers.draw(draw_peers.read_figures())
    committed = draw_peers.PICTURE.read_text(encoding="utf-8")
    assert committed == picture, "run tests/bench/draw_peers.py"
    shown = f"]({draw_peers.PICTURE.relative_to(ROOT)})"
    assert shown in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_what_the_committed_result_says() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"step of memd takes ([\d.]+) s and ([\d.]+) GB, one of DeepSpeed with NVMe ([\d.]+) s and "
        r"([\d.]+) GB, one of plain PyTorch ([\d.]+) s and ([\d.]+) GB",
        text,
    )
    assert said
    figures = draw_peers.read_figures()
    measured = [
        f"{figures[f'{name}: {what}'] * scale:.2f}"
        for name in ("memd-quarter-in-backward", "deepspeed-nvme", "plain")
        for what, scale in (("step", 1.0), ("memory, steady", 1e-9))
    ]
    assert list(said.groups()) == measured


def test_the_overview_is_short_and_has_pictures() -> None:
    text = OVERVIEW.read_text(encoding="utf-8")
    assert len(text.split()) <= OVERVIEW_WORDS_MAX
    diagrams = re.findall(r"^```mermaid\n([\w-]+)", text, re.MULTILINE)
    assert set(diagrams) == DIAGRAMS


@pytest.mark.parametrize("heading", PATH_FILES_MAX)
def test_a_path_of_the_overview_touches_few_files(heading: str) -> None:
    named = {file for file, _ in REFERENCE.findall(sections(OVERVIEW)[heading])}
    assert 3 <= len({find(file) for file in named}) <= PATH_FILES_MAX[heading]


def test_the_overview_lists_folders_in_the_order_of_their_includes() -> None:
    text = sections(OVERVIEW)["Folders"]
    assert tuple(re.findall(r"^\| `native/(\w+)` \|", text, re.MULTILINE)) == NATIVE_LAYERS
    _, store = text.split("| folder | owns |")
    assert tuple(re.findall(r"^\| `(\w+)` \|", store, re.MULTILINE)) == STORE_LAYERS


def test_the_overview_draws_the_edges_that_an_entry_has() -> None:
    drawn = set(re.findall(r"^ *(\w+) --> (\w+)", OVERVIEW.read_text(), re.MULTILINE))
    allowed = set(re.findall(r"\ballow\((\w+), (\w+)\)", find("entry.cc").read_text()))
    assert allowed
    assert drawn == allowed


def test_decisions_have_one_shape_and_are_in_the_index() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    pages = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")
    assert pages
    wrong = [page.name for page in pages if f"({page.name})" not in index]
    for page in pages:
        headings = list(sections(page))
        if headings[1:] != ["Context", "Decision", "Consequences"]:
            wrong.append(f"{page.name}: {headings}")
        if len(page.read_text(encoding="utf-8").split()) > 500:
            wrong.append(f"{page.name} is longer than a page")
    assert not wrong


def test_the_table_of_a_sessions_memory_is_that_of_the_header(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "shared-memory.md").read_text(encoding="utf-8")
    checks = []
    for offset, size, field in re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| `(\w+(?:::\w+)*\.[\w.]+)` \|", text, re.MULTILINE
    ):
        kind, _, member = field.partition(".")
        checks += [
            f"static_assert(offsetof(memd::{kind}, {member}) == {offset.replace(',', '')});",
            f"static_assert(sizeof(std::declval<memd::{kind}>().{member}) == "
            f"{size.replace(',', '')});",
        ]
    assert len(checks) >= 2 * 40
    source = tmp_path / "layout.cc"
    source.write_text("\n".join(['#include "ring/layout.h"', "#include <utility>", *checks]))
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof"]
    command += [f"-I{ROOT / 'native'}", str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


@pytest.mark.parametrize(
    ("document", "claim", "file", "constants"),
    [
        ("format.md", r"This is format (\d+)\.(\d+)", "volume.h", ["kFormatMajor", "kFormatMinor"]),
        ("format.md", r"\| minor version, (\d+)", "volume.h", ["kFormatMinor"]),
        (
            "shared-memory.md",
            r"`SessionHeader.protocol_version` \| (\d+)",
            "layout.h",
            ["kProtocolVersion"],
        ),
        (
            "shared-memory.md",
            r"version (\d+), source `ledger_layout.h`",
            "ledger_layout.h",
            ["kLedgerVersion"],
        ),
        (
            "shared-memory.md",
            r"version (\d+), source `tile_words.cc`",
            "tile_words.cc",
            ["kTileWordsVersion"],
        ),
    ],
)
def test_a_document_is_of_the_version_that_the_sources_write(
    document: str, claim: str, file: str, constants: list[str]
) -> None:
    text = " ".join((ROOT / "docs" / document).read_text(encoding="utf-8").split())
    found = re.search(claim, text)
    assert found is not None
    source = find(file).read_text(encoding="utf-8")
    written = [re.search(rf"\b{name} = (\d+);", source) for name in constants]
    assert [each[1] for each in written if each] == list(found.groups())


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("void Store::lease(int a) {\n}", "Store::lease", True),
        ("void Store::lease(int a) {\n}", "lease", True),
        ("void Store::lease(int a) {\n}", "Other::lease", False),
        ("void lease(int a) const {\n}", "lease", True),
        ("void lease(int a);\nvoid f() {\n  lease(1);\n}", "lease", False),
        ("  if (lease(1)) {\n}", "lease", False),
        ("// lease(int a) {\nint x;", "lease", False),
        ("class Lease {\n  int at() const { return 1; }\n};", "Lease::at", True),
        ("class Lease;", "Lease", False),
        ("Lease::Lease(int a)\n    : a_(a) {}", "Lease::Lease", True),
        ("  int at() { return lease(2); }", "lease", False),
    ],
)
def test_a_definition_is_told_from_a_call_and_a_declaration(
    source: str, name: str, expected: bool
) -> None:
    assert is_defined_in_cpp(source, name) is expected
