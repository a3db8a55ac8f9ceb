"""Man pages and completion: groff and bash take them, and they say what the command line says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from deploy import manual
from memd.cli import main

COMMANDS = {manual.name_of(context): (command, context) for command, context in manual.commands()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("share")
    manual.write(made)
    return made


def rendered(page: str) -> str:
    """As `man` shows it; groff's warnings fail."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed; `make test` installs it")
    answer = subprocess.run(
        ["groff", "-man", "-ww", "-rLL=10000m", "-Tutf8", "-P-cbou"],
        input=page,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stderr == ""
    return answer.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_page_has_all_that_help_has(folder: Path, name: str) -> None:
    command, context = COMMANDS[name]
    shown = " ".join(rendered((folder / "man/man1" / f"{name}.1").read_text()).split())
    assert f"{name} - " in shown
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            names, text = record
            assert f"{names} {' '.join(text.split())}".replace("`", "") in shown, names
    for paragraph in (command.help or "").split("\n\n"):
        assert " ".join(paragraph.split()).replace("`", "") in shown
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            assert f"{name}-{below}(1)" in shown
    for reference in re.findall(r"(memd[a-z-]*)\(1\)", shown):
        assert (folder / "man/man1" / f"{reference}.1").exists()


def test_a_text_cannot_become_a_request() -> None:
    command = click.Command("odd", help=".SH not a section\n\n'br, a back\\slash and `--flag`.")
    shown = rendered(manual.page_of(command, click.Context(command, info_name="odd")))
    assert ".SH not a section" in shown
    assert "'br, a back\\slash and --flag." in shown


def complete_in_bash(folder: Path, words: str) -> list[str]:
    """As after the tabulator, at the end of `words`."""
    script = """
source "$0/bash-completion/completions/memd"
eval "COMP_WORDS=($1)"
[[ $1 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p memd | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
"$function" memd
printf '%s\\n' "${COMPREPLY[@]}"
"""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    answer = subprocess.run(
        ["bash", "-c", script, str(folder), words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": programs},
    )
    assert answer.stderr == ""
    return answer.stdout.split()


def test_bash_completes_commands_and_options(folder: Path) -> None:
    assert complete_in_bash(folder, "memd vol") == ["volume"]
    assert set(complete_in_bash(folder, "memd job ")) == set(main.commands["job"].commands)  # type: ignore[attr-defined]
    assert complete_in_bash(folder, "memd status --infl") == ["--inflight"]
    assert complete_in_bash(folder, "memd status --probe ") == ["ready", "live"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_answered_in_their_form(folder: Path, shell: str) -> None:
    (script,) = [path for path in folder.rglob("*memd*") if shell in str(path) and path.is_file()]
    assert f"_MEMD_COMPLETE={shell}_complete" in script.read_text()
    environ = {**os.environ, "_MEMD_COMPLETE": f"{shell}_complete", "COMP_WORDS": "memd vol"}
    environ["COMP_CWORD"] = "1" if shell == "zsh" else "vol"
    answer = subprocess.run(
        [Path(sys.executable).with_name("memd")],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    assert "volume" in answer.stdout
    assert "Volumes: the files on disk that hold all" in answer.stdout
    if shutil.which(shell) is not None:
        subprocess.run([shell, "--no-execute", script], check=True)
