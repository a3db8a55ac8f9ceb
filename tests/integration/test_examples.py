"""The examples of client/examples: training loops of other libraries, with memd and without."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"
# The line behind which each is killed: some steps after a checkpoint.
KILLED_AFTER = {
    "accelerate_loop": "step 6",
    "lightning_trainer": "batch 12",
    "peft_lora": "step 6",
    "transformers_trainer": "step 6",
}
LOSS = re.compile(r"^(.+) loss (\S+)$")

pytestmark = [pytest.mark.more, pytest.mark.nvme, pytest.mark.timeout(600)]


def lines_of(name: str, out: Path, *flags: str, killed_after: str = "") -> Iterator[str]:
    """Runs an example and gives its lines as they come; with `killed_after`, up to its loss."""
    out.mkdir(exist_ok=True)
    address = f"embedded:{out.parent / 'memd'}?host=128MiB&nvme=256MiB"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(out), *flags]
    with (
        (out / "stderr").open("w") as stderr,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "MEMD_ADDRESS": address, "HF_HUB_OFFLINE": "1"},
        ) as trainer,
    ):
        assert trainer.stdout is not None
        for line in trainer.stdout:
            yield line.rstrip()
            if killed_after and line.startswith(f"{killed_after} loss "):
                trainer.send_signal(signal.SIGKILL)
    expected = -signal.SIGKILL if killed_after else 0
    assert trainer.returncode == expected, (out / "stderr").read_text()[-4000:]


def losses(name: str, out: Path, *flags: str, killed_after: str = "") -> dict[str, str]:
    matches = map(LOSS.match, lines_of(name, out, *flags, killed_after=killed_after))
    return {match[1]: match[2] for match in matches if match}


def test_each_example_is_run() -> None:
    assert sorted(KILLED_AFTER) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", KILLED_AFTER)
def test_an_example_that_is_killed_and_resumed_has_the_numbers_of_plain_pytorch(
    name: str, tmp_path: Path
) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    expected = losses(name, plain, "--plain")
    before = losses(name, ours, killed_after=KILLED_AFTER[name])
    after = losses(name, ours, "--resume")
    assert len(expected) >= 12
    assert KILLED_AFTER[name] in before
    assert KILLED_AFTER[name] in after, "it went on behind the checkpoint"
    assert len(after) < len(expected), "it began anew"
    assert before | after == expected
    assert before.items() <= expected.items()

    wanted = torch.load(plain / "weights.pt", weights_only=True)
    found = torch.load(ours / "weights.pt", weights_only=True)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
