"""Folders that replace others whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd_client.checkpoints import whole_folder
from memd_client.checkpoints.whole_folder import WholeFolder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_files_of_others_are_in_the_new_folder_when_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "checkpoint"
    (place / "tokenizer").mkdir(parents=True)
    (place / "model.bin").write_text("old")
    (place / "notes.txt").write_text("mine")
    (place / "tokenizer" / "vocab.txt").write_text("mine")
    exchange = whole_folder._exchange
    seen = []

    def look(one: Path, other: Path) -> None:
        exchange(one, other)
        seen.append(contents(place))  # a kill here leaves this

    monkeypatch.setattr(whole_folder, "_exchange", look)
    with WholeFolder(place) as folder:
        (folder.path / "model.safetensors").write_text("new")
        folder.place(lambda name: name != "model.bin")
    wanted = {"model.safetensors": "new", "notes.txt": "mine", "tokenizer/vocab.txt": "mine"}
    assert seen == [wanted]
    assert contents(place) == wanted
    assert list(tmp_path.iterdir()) == [place]


def test_what_others_put_there_during_the_exchange_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "checkpoint"
    place.mkdir()
    exchange = whole_folder._exchange

    def put_and_exchange(one: Path, other: Path) -> None:
        (place / "late.txt").write_text("mine")
        exchange(one, other)

    monkeypatch.setattr(whole_folder, "_exchange", put_and_exchange)
    with WholeFolder(place) as folder:
        (folder.path / "model.safetensors").write_text("new")
        folder.place(lambda name: True)
    assert contents(place) == {"late.txt": "mine", "model.safetensors": "new"}
