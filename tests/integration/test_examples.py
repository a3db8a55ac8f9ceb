"""The examples of client/examples: training loops of other libraries, with memd and without."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.forks import shared_forks

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"
# The line behind which each is killed: some steps after a checkpoint.
KILLED_AFTER = {
    "accelerate_loop": "step 6",
    "lightning_trainer": "batch 13",
    "peft_lora": "step 6",
    "transformers_trainer": "step 6",
}
# Those whose steps are commits: `--resume` goes on at the last of them. Their checkpoint that a
# kill leaves, and how many losses were printed before it.
GO_ON_AT_COMMITS = {
    "accelerate_loop": (Path("checkpoint"), 4),
    "lightning_trainer": (Path("checkpoints"), 8),
    "transformers_trainer": (Path("checkpoints", "checkpoint-4"), 4),
}
# Streamed, with the library's bytes.
SAME_FILES = {
    "accelerate_loop": [Path("checkpoint", "model.safetensors")],
    "transformers_trainer": [
        Path("checkpoints", "checkpoint-12", name) for name in ("config.json", "model.safetensors")
    ],
}
# Trainers are forks of a process that has imported these: each would take ten seconds for it.
IMPORTED = (
    "memd_client.integrations.accelerate",
    "memd_client.integrations.lightning",
    "memd_client.integrations.transformers",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
)
LOSS = re.compile(r"^(.+) loss (\S+)$")

pytestmark = [pytest.mark.more, pytest.mark.nvme, pytest.mark.timeout(600)]


def lines_of(name: str, out: Path, *flags: str, killed_after: str = "") -> Iterator[str]:
    """Runs an example and gives its lines as they come; with `killed_after`, up to its loss."""
    out.mkdir(exist_ok=True)
    address = f"embedded:{out.parent / 'memd'}?host=128MiB&nvme=256MiB"
    environ = {**os.environ, "MEMD_ADDRESS": address, "HF_HUB_OFFLINE": "1"}
    template = shared_forks(*IMPORTED)
    with template.start(EXAMPLES / f"{name}.py", str(out), *flags, environ=environ) as trainer:
        for line in trainer.lines():
            yield line.rstrip()
            if killed_after and line.startswith(f"{killed_after} loss "):
                trainer.kill()
        _, errors = trainer.communicate()
    assert trainer.returncode == (-signal.SIGKILL if killed_after else 0), errors[-4000:]


def losses(name: str, out: Path, *flags: str, killed_after: str = "") -> dict[str, str]:
    matches = map(LOSS.match, lines_of(name, out, *flags, killed_after=killed_after))
    return {match[1]: match[2] for match in matches if match}


def assert_equal_weights(found: Path, wanted: Path) -> None:
    ours = torch.load(found / "weights.pt", weights_only=True)
    expected = torch.load(wanted / "weights.pt", weights_only=True)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key


def test_each_example_is_run() -> None:
    assert sorted(KILLED_AFTER) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", KILLED_AFTER)
def test_an_example_that_is_killed_and_resumed_has_the_numbers_of_plain_pytorch(
    name: str, tmp_path: Path
) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    expected = losses(name, plain, "--plain")
    before = losses(name, ours, killed_after=KILLED_AFTER[name])
    if name in GO_ON_AT_COMMITS:
        shutil.copytree(ours / GO_ON_AT_COMMITS[name][0], tmp_path / "kept")
    after = losses(name, ours, "--resume")
    assert len(expected) >= 12
    assert KILLED_AFTER[name] in before
    if name not in GO_ON_AT_COMMITS:
        assert KILLED_AFTER[name] in after, "it went on behind the checkpoint"
    assert len(after) < len(expected), "it began anew"
    assert before | after == expected
    assert before.items() <= expected.items()
    assert_equal_weights(ours, plain)
    for file in SAME_FILES.get(name, ()):
        assert (ours / file).read_bytes() == (plain / file).read_bytes(), file
    if name in GO_ON_AT_COMMITS:
        repeated = before.keys() & after.keys()
        assert repeated <= set(list(before)[-2:]), "it lost committed steps"
        go_on_at_checkpoint(name, ours, tmp_path / "kept", expected)
        assert_equal_weights(ours, plain)


def go_on_at_checkpoint(name: str, ours: Path, kept: Path, expected: dict[str, str]) -> None:
    """The library's own, in a job that has gone further."""
    place, count = GO_ON_AT_COMMITS[name]
    shutil.rmtree(ours / place.parts[0])
    shutil.copytree(kept, ours / place)
    again = losses(name, ours, "--resume-checkpoint")
    mean = again.pop("mean", None)
    rest = dict(list(expected.items())[count:])
    rest.pop("mean", None)
    assert again == rest
    if mean is not None:
        total = sum(map(float, again.values()))
        assert float(mean) == pytest.approx(total / len(again))
