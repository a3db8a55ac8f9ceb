"""The repository's own rules, as tests: what no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
CLIENT = ROOT / "client" / "memd_client"
# A folder may include only from itself and from those before it.
NATIVE_LAYERS = ("base", "arena", "ring", "io", "optim", "plan", "store", "server", "bench", "bind")
# The same for the owners of state within store/.
STORE_LAYERS = (
    *("format", "space", "journal", "cache", "state", "step", "recovery", "verify"),
    *("job", "snapshot"),
)
# Packages of the client, and what lies beside them. A module may import only those before it, for
# type checking too. The root holds what users call, and imports no integration.
CLIENT_PACKAGES = {
    "base": (
        *("process", "interrupts", "freed_memory", "dynamo", "identity", "overlaps", "sizes"),
        *("dtypes", "file_reads", "mapped_files", "address", "credential", "plain", "statistics"),
        *("stalls", "checksum", "tensor_bytes", "storage_uses", "kept_memory", "device_waits"),
    ),
    "connection": (
        *("shard", "launcher", "calls", "retry", "attach", "temporary_folders", "embedded"),
        *("control", "snapshot_reading", "reattach"),
    ),
    "core": (
        *("backward", "comparisons", "ranks", "rank_group", "rank_calls", "rank_changes"),
        *("gradient_order", "registration", "parameter_leases", "devices", "leases"),
        "rank_gradients",
        *("tensor_streams", "registry", "snapshot_reader", "temporary_snapshots", "scratch_uses"),
        *("job_store", "tied_names", "first_values"),
        *("held_names", "open_steps", "step_in_flight", "steps", "moving_moments", "old_state"),
        *("load", "old_loads"),
        *("job", "name_uses", "blobs", "scratch"),
    ),
    "device": (
        *(
            "filled_memory",
            "space",
            "device_range",
            "budget",
            "use_order",
            "event_thread",
            "arrivals",
            "deferred_step",
            "copies",
            "gradient_change",
            "departures",
            "kept_gradients",
            "departed_gradients",
            "activation_copies",
            "device_leases",
            "device_checksums",
            "early_gradient",
            "staying_copies",
        ),
        "model_on_device",
    ),
    "transaction": (
        *("adam_settings", "metadata", "moments", "shown_states", "loaded_moments"),
        *("transaction", "module_names", "buffers"),
    ),
    "parameters": (
        *("lazy", "hole", "hidden", "stored_parameter", "early", "alias", "assigned"),
        *(
            "shared_gradient",
            "changes_of_ranks",
            "gradients",
            "departed_unscaling",
            "shared_unscaling",
            "casts",
            "views",
        ),
        *("given_memory", "thread_uses", "value_count", "old_users", "residency"),
        *("parameter", "saved_tensors", "away", "in_place", "tiles", "placement"),
        *("stored_bytes", "saved_activations", "module_hooks"),
        *("unnamed", "unnamed_parameter", "gathered_tiles", "whole_values", "model_tensors"),
        "loaded_places",
    ),
    "updates": (
        *("stateful_target", "streamed_target", "delayed_value", "late_target"),
        *("resident_target", "device_target", "sharded_target", "fully_sharded", "resident_ranks"),
        *("empty_target", "targets", "delayed_values", "delayed_updates", "pending_states"),
        *("target_table", "clipping", "loaded_states"),
    ),
    "checkpoints": (
        *("safetensors_header", "checkpoint_files", "partial_name", "whole_file", "whole_folder"),
        *("torch_archive", "tensor_archive", "snapshot_tensor", "snapshot_items"),
        *("checkpoint_folder", "checkpoint_writer", "checkpoint_metadata", "archived_tensor"),
        "checkpoint_reader",
    ),
}
CLIENT_INTEGRATIONS = (
    *("adam_states", "load_tensors", "progress", "refusals", "transformers", "accelerate_loader"),
    *("accelerate_files", "accelerate", "lightning_loop", "lightning"),
)
CLIENT_FOLDERS = (*CLIENT_PACKAGES, "integrations")
CLIENT_LAYERS = (
    "errors",
    *(f"{package}.{name}" for package, names in CLIENT_PACKAGES.items() for name in names),
    *(
        "random_states",
        "tracked",
        "session",
        "tile_linears",
        "offload",
        "init",
        "optimizer",
        "gather",
        "connect",
    ),
    "reduce_hook",
    *("deepspeed", "load_safetensors", "save_safetensors", "optimizer_safetensors"),
    *("checkpoint", "__init__"),
    *(f"integrations.{name}" for name in CLIENT_INTEGRATIONS),
)
METHODS_MAX = 40
FILE_BYTES_MAX = 500 * 1024
TOP_LEVEL = {
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "client",
    "deploy",
    "docs",
    "memd",
    "native",
    "proto",
    "pyproject.toml",
    "tests",
}
# Generated, or a text that is not ours.
NOT_OURS = ("proto/memd_proto/", "LICENSE")


def repository_files() -> list[Path]:
    """Tracked files and those that would be: what `git add` would take."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing tells sources from what a build left")
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    command += ["--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for line in listing.splitlines() if (path := ROOT / line).is_file()]


def our_texts() -> Iterator[tuple[Path, str]]:
    for path in repository_files():
        relative = path.relative_to(ROOT)
        if not relative.as_posix().startswith(NOT_OURS) and path.suffix != ".png":
            yield relative, path.read_text(encoding="utf-8")


def native_files(*suffixes: str) -> list[Path]:
    return sorted(
        path
        for pattern in ("*/*", "store/*/*")
        for path in NATIVE.glob(pattern)
        if path.suffix in suffixes and path.is_file()
    )


def imported_modules(path: Path) -> set[str]:
    """The top-level names of everything that a Python file imports, at any depth of its code."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.add(node.module.partition(".")[0])
    return modules


def importers(folder: Path, *forbidden: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")])
        for name in sorted(imported_modules(path) & set(forbidden))
    ]


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def test_native_folders_include_only_from_those_before_them() -> None:
    def layer(path: Path) -> str:
        return path.relative_to(NATIVE).parts[0]

    assert {layer(path) for path in native_files(".h", ".cc")} <= set(NATIVE_LAYERS)
    wrong = [
        f"{path.relative_to(ROOT)} includes {included}"
        for path in native_files(".h", ".cc")
        for included in includes(path)
        if included.partition("/")[0] not in NATIVE_LAYERS[: NATIVE_LAYERS.index(layer(path)) + 1]
    ]
    assert not wrong


def test_owners_in_the_store_include_only_from_those_before_them() -> None:
    # What lies in store/ itself puts them together, and stands above all of them.
    store = NATIVE / "store"
    files = [path for path in native_files(".h", ".cc") if path.parent.parent == store]
    assert {path.parent.name for path in files} <= set(STORE_LAYERS)
    wrong = []
    for path in files:
        below = STORE_LAYERS[: STORE_LAYERS.index(path.parent.name) + 1]
        for included in includes(path):
            folder, _, rest = included.partition("/")
            if folder == "store" and rest.partition("/")[0] not in below:
                wrong.append(f"{path.relative_to(ROOT)} includes {included}")
    assert not wrong


def test_a_ledger_is_known_to_the_journal_alone() -> None:
    # JobLedger owns it and tells it; others would tell one that is not there, or one that was.
    private = {"store/journal/ledger.h", "store/journal/ledger_layout.h"}
    journal = NATIVE / "store" / "journal"
    includers = {
        path
        for path in native_files(".h", ".cc")
        if not private.isdisjoint(includes(path)) or re.search(r"\bLedger\b", path.read_text())
    }
    assert journal / "job_ledger.cc" in includers
    assert {path for path in includers if path.parent != journal} == set()


def test_the_store_copies_fills_and_hashes_through_one_header() -> None:
    # base/bulk_bytes.h counts in test builds what the server thread moves.
    raw = re.compile(
        r"\b(?:memcpy|memmove|memset|mempcpy|copy_past_caches|extent_checksum|record_checksum)\("
        r"|\bstd::(?:ranges::)?(?:copy|copy_n|copy_backward|move_backward|fill|fill_n)\("
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in native_files(".h", ".cc")
        if path.is_relative_to(NATIVE / "store")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if raw.search(line)
    ]
    assert not found


def test_places_that_owe_bytes_are_those_of_the_table() -> None:
    header = (NATIVE / "base" / "bulk_bytes.h").read_text()
    table = set(re.findall(r"\{OwedPlace::(\w+), \"", header))
    used = {
        name
        for path in native_files(".cc", ".h")
        if path.is_relative_to(NATIVE / "store")
        for name in re.findall(r"Owed \w+\(OwedPlace::(\w+)\)", path.read_text())
    }
    assert table == used


def headers_and_sources() -> Iterator[tuple[Path, Path]]:
    """But for those of the binding, which need Python's and nanobind's headers: the build compiles
    them."""
    for header in native_files(".h"):
        if header.parent.name != "bind":
            yield header, header.with_suffix(".cc")


def test_sources_include_their_own_header_first_so_that_the_build_compiles_it_alone() -> None:
    def includes_first(source: Path) -> str:
        found = re.search(r'^#include [<"]([^>"]+)', source.read_text(), re.MULTILINE)
        return found[1] if found else ""

    later = [
        source.relative_to(ROOT).as_posix()
        for header, source in headers_and_sources()
        if source.exists() and includes_first(source) != header.relative_to(NATIVE).as_posix()
    ]
    assert not later


@pytest.mark.soak
@pytest.mark.timeout(1200)  # a minute's work, of which a busy machine gives it a tenth
def test_every_native_header_compiles_alone() -> None:
    """Those without a source of their name."""

    def compile_alone(header: Path) -> str:
        command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{NATIVE}", "-x", "c++", str(header)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    headers = [header for header, source in headers_and_sources() if not source.exists()]
    assert headers
    with ThreadPoolExecutor(2) as pool:
        errors = [
            f"{header.relative_to(ROOT)}: {error}"
            for header, error in zip(headers, pool.map(compile_alone, headers), strict=True)
            if "error:" in error
        ]
    assert not errors


def test_the_client_never_imports_the_daemon() -> None:
    assert not importers(ROOT / "client", "memd")


def client_imports(path: Path) -> set[str]:
    """The modules of the client that one of them imports, at any depth of its code."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memd_client"):
            parts = (node.module or "").split(".")[1:]
            modules.update(client_module(*parts, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            modules.update(client_module(*name[1:]) for name in names if name[0] == "memd_client")
    return modules


def client_module(*parts: str) -> str:
    """The module among memd_client's that `parts` name, or a name inside of it."""
    inside = CLIENT.joinpath(*parts[:1]).is_dir()
    return ".".join(parts[: 2 if inside else 1])


def client_modules() -> dict[str, Path]:
    """Files by dotted name; packages hold nothing of their own."""
    paths = [
        path
        for folder in (CLIENT, *(CLIENT / name for name in CLIENT_FOLDERS))
        for path in folder.glob("*.py")
        if path.name != "__init__.py" or folder == CLIENT
    ]
    return {".".join(path.relative_to(CLIENT).with_suffix("").parts): path for path in paths}


def test_modules_of_the_client_import_only_those_before_them() -> None:
    paths = client_modules()
    assert sorted(paths) == sorted(CLIENT_LAYERS)
    wrong = [
        f"{name} imports {imported}"
        for name, path in paths.items()
        for imported in client_imports(path)
        if imported not in CLIENT_LAYERS[: CLIENT_LAYERS.index(name)]
    ]
    assert not wrong


def daemon_imports(path: Path) -> set[str]:
    """Dotted names that may be modules of the daemon."""
    return {
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }


def test_modules_of_the_daemon_import_each_other_in_no_circle() -> None:
    """Not for types either."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "memd").rglob("*.py")
        if path.name != "__init__.py"
    }
    imported = {name: daemon_imports(path) & paths.keys() for name, path in paths.items()}
    assert sum(len(each) for each in imported.values()) > len(paths)
    assert set(TopologicalSorter(imported).static_order()) == paths.keys()


def test_packages_of_the_client_hold_modules_alone() -> None:
    for name in CLIENT_FOLDERS:
        tree = ast.parse((CLIENT / name / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(tree)
        assert len(tree.body) == 1, name


def client_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(CLIENT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield path.name, node


def test_no_class_of_the_client_has_too_many_methods() -> None:
    counts = {
        f"{file}:{node.name}": sum(isinstance(each, ast.FunctionDef) for each in node.body)
        for file, node in client_classes()
    }
    assert {name for name, count in counts.items() if count > METHODS_MAX} == set()


def test_classes_of_the_client_keep_their_fields_to_themselves() -> None:
    """Records and exceptions excepted, whose fields are what they are for."""
    public = [
        f"{file}:{node.name}.{target.attr}"
        for file, node in client_classes()
        if not any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        if not any(ast.unparse(base).endswith("Error") for base in node.bases)
        for each in ast.walk(node)
        if isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        if not target.attr.startswith("_")
    ]
    assert not public


def private_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Private attributes that a file's own classes have, and those that it reads of any object."""
    owned: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            owned.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            owned.add(node.target.id)
        elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            (owned if ast.unparse(node.value) == "self" else read).add(node.attr)
    return owned, read


def test_no_file_of_the_client_reads_anothers_private_fields() -> None:
    trees = {
        path.name: ast.parse(path.read_text(encoding="utf-8")) for path in client_modules().values()
    }
    names = {file: private_names(tree) for file, tree in trees.items()}
    wrong = [
        f"{file} reads {name} of {owner}"
        for file, (own, read) in names.items()
        for name in read - own
        for owner, (theirs, _) in names.items()
        if name in theirs
    ]
    # torch's, of which a class of ours has its own.
    assert not [each for each in wrong if " _version " not in each and " _parameters " not in each]


def test_torch_is_imported_only_by_what_trains_or_writes_its_files() -> None:
    found = importers(ROOT / "memd", "torch", "memd_client", "numpy")
    benches = tuple(f"memd/bench/{name}.py " for name in ("lease", "device", "command"))
    allowed = ("memd/demo/", *benches, "memd/export/dcp_files.py ")
    assert not [line for line in found if not line.startswith(allowed)]


def test_the_native_package_knows_neither_the_daemon_nor_the_client() -> None:
    assert not importers(NATIVE / "python", "memd", "memd_client", "memd_proto", "torch")


def test_no_unfinished_business_is_left_in_the_sources() -> None:
    marks = re.compile(r"\b(?:FIX" + r"ME|TO" + r"DO)\b")
    assert not [str(path) for path, text in our_texts() if marks.search(text)]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    paths = re.compile(r"(?<![\w.])/(?:root|home|work|workspace|Users)/\w+")
    assert not [
        f"{path}: {found.group()}" for path, text in our_texts() if (found := paths.search(text))
    ]


def test_nobody_is_told_to_install_memd_by_its_name() -> None:
    """PyPI's memd is another project: a command names a file, a checkout or what is missing."""
    by_name = re.compile(r"pip install\b.*[\s'\"`]memd(?=[\[=<>~!\"`]|'(?!s)|$)", re.MULTILINE)
    for named in ("memd", "'memd[server]'", "memd==0.1.0"):
        assert by_name.search(f"`pip install -U {named}` does it"), named
    assert not by_name.search("pip install '.[server]' for memd's daemon")
    assert not by_name.search("pip install 'dist/memd-0.1.0.whl[server]'")
    wrong = [
        f"{path}: {found[0]}" for path, text in our_texts() for found in by_name.finditer(text)
    ]
    assert wrong == []


def test_no_large_file_is_tracked() -> None:
    large = {path for path in repository_files() if path.stat().st_size > FILE_BYTES_MAX}
    assert not large


def test_the_top_level_holds_what_the_readme_explains() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in repository_files()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_the_readme_shows_the_folders_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    # A tree is a block whose unindented lines begin with paths: `native/base/   status, units`.
    trees = [block for block in blocks if re.match(r"(?:[\w.-]+/)+(?:\s|$)", block)]
    assert trees
    shown = [
        line.split()[0]
        for tree in trees
        for line in tree.splitlines()
        if re.match(r"[\w.-]+(?:/[\w.-]*)*(?:\s|$)", line)
    ]
    assert [name for name in shown if not (ROOT / name).exists()] == []
