"""Errors of commands: a sentence, and an exit code beside click's 1 for failed and 2 for wrong
use."""

from __future__ import annotations

import logging
from typing import IO, Any

import click

from memd.refusal import Refused, StatusCode, Unreachable

log = logging.getLogger(__name__)


class Damaged(click.ClickException):
    """Data is lost or damaged."""

    exit_code = 3


class NoDaemon(click.ClickException):
    exit_code = 4


class WrongUse(click.ClickException):
    """The command could not even begin."""

    exit_code = 2


class Fatal(click.ClickException):
    """The daemon cannot serve: one event of its log, and the exit code of the failure."""

    def __init__(self, failure: click.ClickException) -> None:
        super().__init__(failure.message)
        self.exit_code = failure.exit_code  # type: ignore[misc]  # click has one a class

    def show(self, file: IO[Any] | None = None) -> None:
        log.critical("cannot serve", extra={"reason": self.message})


def failure_of(refused: Refused) -> click.ClickException:
    if isinstance(refused, Unreachable):
        return NoDaemon(str(refused))
    if refused.code is StatusCode.INTEGRITY:
        return Damaged(str(refused))
    return click.ClickException(str(refused))
