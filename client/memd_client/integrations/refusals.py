"""One sentence for each thing that no commit of a library's training can hold."""

from __future__ import annotations

from typing import Any, NoReturn

from memd_client.errors import InvalidArgument


def refuse_scaler(scaler: Any, *, instead: str) -> None:
    """
    Args:
        scaler: the GradScaler that the library has made, or None.
        instead: the setting for bf16.
    """
    if scaler is not None:
        raise InvalidArgument(
            f"fp16 has a GradScaler, which skips steps that memd would commit; use {instead}"
        )


def refuse_processes(count: int, *, what: str) -> None:
    """
    Args:
        what: the library's object that has so many.
    """
    if count != 1:
        raise InvalidArgument(
            f"under a library a job trains in one process in this version, and this {what} has "
            f"{count}"
        )


def refuse_divided(name: str, *, instead: str) -> NoReturn:
    """
    Args:
        name: the strategy or plugin that the library was given.
        instead: what to do.
    """
    raise InvalidArgument(f"{name} keeps or divides parameters itself, as memd does; {instead}")


def refuse_optimizer(optimizer: Any, *, what: str) -> None:
    """
    Args:
        what: who gives the optimizer, with the verb.
    """
    if not getattr(optimizer, "is_part_of_commits", False):
        raise InvalidArgument(
            f"a commit has the states of memd's optimizers alone, and {what} a "
            f"{type(optimizer).__name__}; use memd_client.AdamW or Adam"
        )
