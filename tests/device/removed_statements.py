"""Functions of the client without one of their statements, to see whether anybody misses it."""

from __future__ import annotations

import ast
import inspect
import types
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a function of a module."""

    module: ModuleType
    owner: str  # the class of the function, or nothing
    function: str
    line: int  # in the module's file
    source: str

    def __str__(self) -> str:
        name = self.module.__name__.rpartition(".")[2]
        return f"{name}: {self.source} in {self.function}"


def statements(module: ModuleType, is_wanted: Callable[[ast.Call], bool]) -> list[Statement]:
    """Those that only make a call that `is_wanted`, or assign its result."""
    tree = ast.parse(inspect.getsource(module))
    found = []
    for owner, function in _functions(tree):
        for node in ast.walk(function):
            if not isinstance(node, ast.Expr | ast.Assign):
                continue
            if any(isinstance(each, ast.Call) and is_wanted(each) for each in ast.walk(node)):
                source = ast.unparse(node)
                found.append(Statement(module, owner, function.name, node.lineno, source))
    return found


@contextmanager
def removed(statement: Statement) -> Iterator[None]:
    """Inside, its function does not make it."""
    module = statement.module
    tree = ast.parse(inspect.getsource(module))
    tree = ast.fix_missing_locations(_Remover(statement).visit(tree))
    changed: dict[str, Any] = {**vars(module)}
    exec(compile(tree, module.__file__ or "", "exec"), changed)
    owner = getattr(module, statement.owner) if statement.owner else module
    new = changed[statement.owner] if statement.owner else changed
    made = new[statement.function] if isinstance(new, dict) else vars(new)[statement.function]
    before: Any = vars(owner)[statement.function]
    # In the old module's globals, whose classes others refer to.
    replaced = types.FunctionType(made.__code__, vars(module), made.__name__, made.__defaults__)
    replaced.__kwdefaults__ = made.__kwdefaults__
    setattr(owner, statement.function, replaced)
    try:
        yield
    finally:
        setattr(owner, statement.function, before)


class _Remover(ast.NodeTransformer):
    def __init__(self, statement: Statement) -> None:
        self._statement = statement

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if (
            isinstance(node, ast.Expr | ast.Assign)
            and node.lineno == self._statement.line
            and ast.unparse(node) == self._statement.source
        ):
            return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield node.name, each
