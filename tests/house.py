"""How large the code's classes and functions are, and which of them break the limits.

C++ is read by tree-sitter's grammar, which needs neither a build nor the headers that a file
includes; Python by `ast`. Methods are counted without constructors, destructors, assignments and
Python's special methods; data members without static ones. The lines of a lambda are also those of
the function around it. A record is a struct without methods that change it, or in Python a frozen
dataclass.

Run: python -m tests.house [--root CHECKOUT]
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tree_sitter_cpp
from tree_sitter import Language, Parser

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tree_sitter import Node

ROOT = Path(__file__).parents[1]
METHODS_MAX = 40
FUNCTION_LINES_MAX = 150
# The classes whose owners the overview describes.
CLASS_FOLDERS = ("native/store", "native/ring", "native/server", "client/memd_client")
FUNCTION_FOLDERS = ("native", "memd", "client/memd_client")

_CPP = Parser(Language(tree_sitter_cpp.language()))
_CLASS = ("class_specifier", "struct_specifier")


@dataclass(slots=True)
class Class:
    name: str
    file: str
    # Has no method that changes it: it is as its one writer left it.
    is_record: bool
    methods: set[str] = field(default_factory=set)
    public_data: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)

    @property
    def label(self) -> str:
        """Both sides have a Session."""
        return f"{self.file.partition('/')[0]} {self.name}"

    @property
    def exposed_data(self) -> list[str]:
        """What others may write beside the class's own methods."""
        return [] if self.is_record else self.public_data


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    file: str
    lines: int


@dataclass(slots=True)
class House:
    classes: list[Class]
    functions: list[Function]
    # By folder, native/ only.
    lines: dict[str, int]

    def classes_with_too_many_methods(self) -> dict[str, int]:
        return {
            found.label: len(found.methods)
            for found in self.classes
            if len(found.methods) > METHODS_MAX
        }

    def classes_with_exposed_data(self) -> dict[str, int]:
        return {
            found.label: len(found.exposed_data) for found in self.classes if found.exposed_data
        }

    def functions_that_are_too_long(self) -> dict[str, int]:
        return {
            found.name: found.lines for found in self.functions if found.lines > FUNCTION_LINES_MAX
        }


def survey(root: Path = ROOT) -> House:
    native = sorted([*root.glob("native/**/*.h"), *root.glob("native/**/*.cc")])
    house = House([], [], defaultdict(int))
    definitions: list[tuple[str, str]] = []
    for path in native:
        file = path.relative_to(root).as_posix()
        source = path.read_bytes()
        house.lines[path.parent.relative_to(root).as_posix()] += source.count(b"\n")
        tree = _CPP.parse(source).root_node
        house.functions += _cpp_functions(tree, file)
        if _is_below(file, CLASS_FOLDERS):
            house.classes += _cpp_classes(tree, file)
            definitions += _definitions(tree, file)
    _add_definitions(house.classes, definitions)
    for folder in FUNCTION_FOLDERS[1:]:
        for path in sorted(root.glob(f"{folder}/**/*.py")):
            file = path.relative_to(root).as_posix()
            module = ast.parse(path.read_text(encoding="utf-8"))
            house.functions += _python_functions(module, file)
            if _is_below(file, CLASS_FOLDERS):
                house.classes += _python_classes(module, file)
    return house


def _is_below(file: str, folders: Iterable[str]) -> bool:
    return any(file.startswith(f"{folder}/") for folder in folders)


# --- C++ ------------------------------------------------------------------------------------------


def _text(node: Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode()


def _walk(node: Node, *kinds: str) -> Iterator[Node]:
    if node.type in kinds:
        yield node
    for child in node.named_children:
        yield from _walk(child, *kinds)


def _cpp_functions(tree: Node, file: str) -> Iterator[Function]:
    for node in _walk(tree, "function_definition"):
        if node.child_by_field_name("body") is None:
            continue  # = default, = delete
        name = _function_name(node.child_by_field_name("declarator"))
        yield Function(name, file, node.end_point[0] - node.start_point[0] + 1)


def _function_declarator(node: Node | None) -> Node | None:
    """Below references and pointers; None where it is data, such as a pointer to a function."""
    while node is not None and node.type in ("reference_declarator", "pointer_declarator"):
        node = node.named_children[-1]
    if node is None or node.type != "function_declarator":
        return None
    inner = node.child_by_field_name("declarator")
    return None if inner is None or inner.type == "parenthesized_declarator" else node


def _function_name(declarator: Node | None) -> str:
    found = _function_declarator(declarator)
    return _text(found.child_by_field_name("declarator") if found else declarator)


def _cpp_classes(tree: Node, file: str) -> Iterator[Class]:
    for node in _walk(tree, *_CLASS):
        body = node.child_by_field_name("body")
        if body is None or node.child_by_field_name("name") is None:
            continue
        outer = _outer_classes(node)
        found = Class("::".join([*outer, _class_name(node)]), file, is_record=True, files={file})
        _read_members(found, body, is_public=node.type == "struct_specifier")
        if node.type == "class_specifier":
            found.is_record = False
        yield found


def _class_name(node: Node) -> str:
    return _text(node.child_by_field_name("name")).partition("<")[0]


def _outer_classes(node: Node) -> list[str]:
    names: list[str] = []
    parent = node.parent
    while parent is not None:
        if parent.type in _CLASS:
            names.insert(0, _class_name(parent))
        parent = parent.parent
    return names


def _read_members(found: Class, body: Node, *, is_public: bool) -> None:
    own = found.name.rpartition("::")[2]
    for member in body.named_children:
        if member.type == "access_specifier":
            is_public = _text(member) == "public"
            continue
        if member.type == "template_declaration":
            member = member.named_children[-1]
        if member.type not in ("field_declaration", "function_definition", "declaration"):
            continue
        for declarator in member.children_by_field_name("declarator"):
            function = _function_declarator(declarator)
            if function is None:
                if is_public and not _is_static(member):
                    found.public_data.append(_text(declarator))
                continue
            name = _text(function.child_by_field_name("declarator"))
            if name in (own, f"~{own}", "operator="):
                continue
            found.methods.add(f"{name}{_text(function.child_by_field_name('parameters'))}")
            is_const = any(_text(child) == "const" for child in function.children)
            if not is_const and not _is_static(member):
                found.is_record = False


def _is_static(member: Node) -> bool:
    return any(
        child.type == "storage_class_specifier" and _text(child) == "static"
        for child in member.children
    )


def _definitions(tree: Node, file: str) -> Iterator[tuple[str, str]]:
    """The class of each method that is defined outside of it, and the file."""
    for node in _walk(tree, "function_definition"):
        scope, _, _ = _function_name(node.child_by_field_name("declarator")).rpartition("::")
        if scope:
            yield scope, file


def _add_definitions(classes: Sequence[Class], definitions: Iterable[tuple[str, str]]) -> None:
    by_name: dict[str, list[Class]] = defaultdict(list)
    for found in classes:
        by_name[found.name].append(found)
    for scope, file in definitions:
        named = by_name[scope]
        # A name may be taken in several files, each for itself.
        for found in [one for one in named if one.file == file] or named[:1]:
            found.files.add(file)


# --- Python ---------------------------------------------------------------------------------------


def _python_functions(module: ast.Module, file: str) -> Iterator[Function]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(node.name, file, (node.end_lineno or 0) - node.lineno + 1)


def _python_classes(module: ast.Module, file: str) -> Iterator[Class]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found = Class(node.name, file, is_record=_is_record(node, methods), files={file})
            found.methods = {
                each.name for each in methods if not (each.name[:2] == each.name[-2:] == "__")
            }
            found.public_data = sorted(_public_attributes(node, methods))
            yield found


def _is_record(node: ast.ClassDef, methods: Sequence[ast.FunctionDef]) -> bool:
    """Its members are written once, or it has no method that could share them with others."""
    bases = [ast.unparse(base) for base in node.bases]
    if any(base.endswith(("Enum", "NamedTuple", "Protocol", "Error")) for base in bases):
        return True
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if not any("dataclass" in each for each in decorators):
        return False
    return any("frozen=True" in each for each in decorators) or all(
        "property" in [ast.unparse(each) for each in method.decorator_list] for method in methods
    )


def _public_attributes(node: ast.ClassDef, methods: Sequence[ast.FunctionDef]) -> set[str]:
    names = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if "ClassVar" not in ast.unparse(each.annotation)
    }
    names |= {
        each.attr
        for method in methods
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }
    return {name for name in names if not name.startswith("_")}


# --- the report -----------------------------------------------------------------------------------


def report(house: House) -> str:
    parts = ["## Classes", "", _class_table(house.classes)]
    parts += ["## Lines of native/", "", _line_table(house.lines)]
    parts += ["## Lines of a function", "", _function_table(house.functions)]
    parts += ["## Beyond the limits", "", _offenders(house)]
    return "\n".join(parts)


def _class_table(classes: Sequence[Class]) -> str:
    rows = ["| class | methods | public data | files | where |", "|---|--:|--:|--:|---|"]
    order = sorted(
        classes, key=lambda each: (-len(each.methods), -len(each.public_data), each.name)
    )
    rows += [
        f"| {'record ' * each.is_record}`{each.name}` | {len(each.methods)} "
        f"| {len(each.public_data)} | {len(each.files)} | {each.file} |"
        for each in order
    ]
    return "\n".join([*rows, ""])


def _line_table(lines: dict[str, int]) -> str:
    rows = ["| folder | lines |", "|---|--:|"]
    rows += [f"| {folder} | {count:,} |" for folder, count in sorted(lines.items())]
    return "\n".join([*rows, f"| together | {sum(lines.values()):,} |", ""])


def _function_table(functions: Sequence[Function]) -> str:
    rows = ["| in | functions | median | 90 % | longest | which |", "|---|--:|--:|--:|--:|---|"]
    groups = {folder: [folder] for folder in ("native", "memd", "client")}
    groups |= {folder: [folder] for folder in CLASS_FOLDERS}
    for group, folders in groups.items():
        found = [each for each in functions if _is_below(each.file, folders)]
        if not found:
            continue
        found.sort(key=lambda each: each.lines)
        median, ninth = (found[len(found) * tenths // 10] for tenths in (5, 9))
        rows.append(
            f"| {group} | {len(found):,} | {median.lines} | {ninth.lines} | {found[-1].lines} "
            f"| `{found[-1].name}` in {found[-1].file} |"
        )
    return "\n".join([*rows, ""])


def _offenders(house: House) -> str:
    def listed(found: dict[str, int]) -> str:
        order = sorted(found.items(), key=lambda item: -item[1])
        return ", ".join(f"`{name}` {count}" for name, count in order) or "none"

    long = house.functions_that_are_too_long()
    return "\n".join(
        (
            f"- more than {METHODS_MAX} methods: {listed(house.classes_with_too_many_methods())}",
            f"- data that others may write: {listed(house.classes_with_exposed_data())}",
            f"- more than {FUNCTION_LINES_MAX} lines: {listed(long)}",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    sys.stdout.write(report(survey(parser.parse_args().root)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
