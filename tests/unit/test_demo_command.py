from pathlib import Path

import pytest
from click.testing import CliRunner

from memd.demo import command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "many"], "is not a number of parameters"),
        (["--steps", "0"], "--steps"),
        (["--dtype", "fp16"], "--dtype"),
        (["--cache", "0"], "is not a fraction"),
        (["--cache", "5/4"], "is not a fraction"),
        (["--cache", "1/0"], "is not a fraction"),
        (["--host", "64"], "has no unit"),
        (["--nvme", "10G"], "is not a size"),
        (["--text", "/missing/text"], "does not exist"),
        (["--data", "/missing/folder"], "does not exist"),
        (["--batch", "0"], "--batch"),
        (["--sequence", "0"], "--sequence"),
        (["--seed", "-1"], "--seed"),
        (["--parms", "5M"], "--params"),
        (["extra"], "extra"),
    ],
)
def test_wrong_use_exits_2_and_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_help_names_every_option() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    for option in ("--params", "--steps", "--dtype", "--host", "--nvme", "--text", "--data"):
        assert option in result.output


def test_a_missing_torch_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 1
    assert "pip install torch" in result.output


def test_a_text_too_short_is_wrong_use(tmp_path: Path) -> None:
    pytest.importorskip("memd_client", reason="the client is not built here")
    (tmp_path / "text").write_text("short")
    result = CliRunner().invoke(command, ["--text", str(tmp_path / "text")])
    assert result.exit_code == 2
    assert "has 5 bytes" in result.output
