"""Writes the man pages and the shell completions of `memd`, from its command line.

Run: python deploy/manual.py FOLDER. The folder is laid out as /usr/share is.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from memd import __version__
from memd.cli import main
from memd.config import DEFAULT_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE = "_MEMD_COMPLETE"
_COMPLETIONS = {
    "bash": "bash-completion/completions/memd",
    "zsh": "zsh/vendor-completions/_memd",
    "fish": "fish/vendor_completions.d/memd.fish",
}
_ENVIRONMENT = [
    ("MEMD_ADDRESS", "The daemon, for scripts, commands and `memd serve`: unix:///path."),
    ("MEMD_CONFIG", "The file of settings, in place of /etc/memd/memd.toml."),
    ("MEMD_NAME", "Any setting that `memd config` shows, its name in capitals: MEMD_HOST=64GiB."),
    ("MEMD_TOKEN_FILE", "The token of a service account, for a daemon with identity = token."),
]
_FILES = [
    (str(DEFAULT_FILE), "Settings of the service. Flags and variables come first."),
    (
        str(DEFAULT_FILE.with_name("conf.d") / "*.toml"),
        "Fragments of it, in the order of their names: a later one wins, and each over the file.",
    ),
]


def commands() -> Iterator[tuple[click.Command, click.Context]]:
    """Each command of the tree, the program itself first."""
    yield from _below(main, click.Context(main, info_name="memd", **main.context_settings))


def _below(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _below(found, click.Context(found, parent=context, info_name=name))


def name_of(context: click.Context) -> str:
    """As git's pages are called: memd-job-list."""
    return context.command_path.replace(" ", "-")


def page_of(command: click.Command, context: click.Context) -> str:
    name = name_of(context)
    lines = [
        f'.TH {_roff(name.upper())} 1 "" "memd {_roff(__version__)}" "memd"',
        ".SH NAME",
        rf"{_roff(name)} \- {_roff(command.get_short_help_str(limit=200).rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_roff(context.command_path)}",
        _roff(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(inspect.cleandoc(command.help or "")),
    ]
    options = [
        record
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    lines += [".SH OPTIONS", *_entries(options)] if options else []
    if isinstance(command, click.Group):
        below = [
            (found, context_below)
            for found, context_below in commands()
            if context_below.parent is not None and name_of(context_below.parent) == name
        ]
        lines += [
            ".SH COMMANDS",
            *_entries(
                [
                    (rf"{name_of(each)}(1)", found.get_short_help_str(limit=200))
                    for found, each in below
                ]
            ),
        ]
    if context.parent is None:
        lines += [".SH ENVIRONMENT", *_entries(_ENVIRONMENT), ".SH FILES", *_entries(_FILES)]
    else:
        lines += [".SH SEE ALSO", rf".BR {_roff(name_of(context.parent))} (1)"]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    for index, paragraph in enumerate(text.split("\n\n")):
        if index:
            yield ".PP"
        yield _marked(" ".join(paragraph.split()))


def _entries(records: list[tuple[str, str]]) -> Iterator[str]:
    for names, text in records:
        yield ".TP"
        yield f".B {_roff(names)}"
        yield _marked(" ".join(text.split())) or r"\&"


def _marked(text: str) -> str:
    """Makes text in backquotes bold."""
    pieces = re.split(r"`([^`]*)`", text)
    shown = [rf"\fB{_roff(each)}\fR" if odd % 2 else _roff(each) for odd, each in enumerate(pieces)]
    joined = "".join(shown)
    return rf"\&{joined}" if joined.startswith((".", "'")) else joined


def _roff(text: str) -> str:
    """Hyphens of options have to be found and copied as such."""
    return text.replace("\\", r"\e").replace("-", r"\-")


def completion_of(shell: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(main, {}, "memd", _VARIABLE).source()


def write(folder: Path) -> list[Path]:
    """The files, some of which may have been there."""
    written = {
        folder / "man" / "man1" / f"{name_of(each)}.1": page_of(command, each)
        for command, each in commands()
    }
    written |= {folder / path: completion_of(shell) for shell, path in _COMPLETIONS.items()}
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(written)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python deploy/manual.py FOLDER")
    sys.stdout.write(f"{len(write(Path(sys.argv[1])))} files in {sys.argv[1]}\n")
