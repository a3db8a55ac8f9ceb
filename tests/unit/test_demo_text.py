from pathlib import Path

import pytest
import torch

from memd.demo.text import Batches, TextError, read_standard_library, read_text


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_sources_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path, {"b.py": "2", "a/z.py": "1", "c.py": "3", "c.txt": "no"})
    assert read_standard_library(tmp_path)[:] == b"123"


def test_what_is_not_the_library_is_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.py": "1",
            "site-packages/torch.py": "no",
            "json/tests/test_json.py": "no",
            "_sysconfigdata__linux.py": "no",
        },
    )
    assert read_standard_library(tmp_path)[:] == b"1"


def test_the_text_is_bounded(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "12345", "b.py": "67890"})
    assert read_standard_library(tmp_path, bytes_max=7)[:] == b"1234567"
    assert read_text(tmp_path / "a.py", bytes_max=3)[:] == b"123"


def test_this_pythons_library_is_there_and_stays_the_same() -> None:
    text = read_standard_library(bytes_max=2**20)[:]
    assert len(text) == 2**20
    assert b"import" in text
    assert read_standard_library(bytes_max=2**20)[:] == text


def test_a_step_gets_the_same_batch_again_and_another_gets_another() -> None:
    text = bytearray(range(256)) * 8
    batches = Batches(text, batch=3, sequence=16, seed=1)
    inputs, targets = batches.at(5)
    again, _ = Batches(text, batch=3, sequence=16, seed=1).at(5)
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, batches.at(6)[0])
    assert not torch.equal(inputs, Batches(text, batch=3, sequence=16, seed=2).at(5)[0])


def test_targets_are_the_inputs_one_byte_later() -> None:
    inputs, targets = Batches(bytearray(range(256)), batch=2, sequence=16, seed=0).at(0)
    assert torch.equal(targets, inputs + 1)


def test_the_whole_text_can_be_one_sequence() -> None:
    inputs, targets = Batches(bytearray(b"abcd"), batch=1, sequence=3, seed=0).at(0)
    assert bytes(inputs[0].tolist()) == b"abc"
    assert bytes(targets[0].tolist()) == b"bcd"


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(TextError, match=r"has 3 bytes.*need 4"):
        Batches(bytearray(b"abc"), batch=1, sequence=3, seed=0)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"empty.txt": ""})
    with pytest.raises(TextError, match="empty"):
        read_text(tmp_path / "empty.txt")
