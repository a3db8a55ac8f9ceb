"""Errors of commands: a sentence, and an exit code beside click's 1 for failed and 2 for wrong
use."""

from __future__ import annotations

import click

from memd.refusal import Refused, StatusCode, Unreachable


class Damaged(click.ClickException):
    """Data is lost or damaged."""

    exit_code = 3


class NoDaemon(click.ClickException):
    exit_code = 4


class WrongUse(click.ClickException):
    """The command could not even begin."""

    exit_code = 2


def failure_of(refused: Refused) -> click.ClickException:
    if isinstance(refused, Unreachable):
        return NoDaemon(str(refused))
    if refused.code is StatusCode.INTEGRITY:
        return Damaged(str(refused))
    return click.ClickException(str(refused))
