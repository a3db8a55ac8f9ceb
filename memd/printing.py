"""Output of commands: a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_lines(table_lines(header, rows))


def print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_message(message: Message) -> None:
    print_json(as_dict(message))


def as_dict(message: Message) -> dict[str, Any]:
    """All fields under their names. Counts are numbers, which protobuf's own JSON has as texts."""

    def plain(enum: Any, value: Any) -> Any:
        if hasattr(value, "DESCRIPTOR"):
            return as_dict(value)
        return enum.values_by_number[value].name if enum else value

    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, MutableSequence):
            values[field.name] = [plain(field.enum_type, each) for each in value]
        else:
            values[field.name] = plain(field.enum_type, value)
    return values
