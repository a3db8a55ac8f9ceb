"""memd_client.integrations: imported on demand, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.forks import forks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.forks import Forks


@pytest.fixture(scope="module")
def client() -> Iterator[Forks]:
    """Programs where the client is imported, and nothing that it does not import itself."""
    with forks("memd_client") as made:
        yield made


@pytest.fixture(scope="module")
def libraries() -> Iterator[Forks]:
    """Programs where the libraries are imported, which takes seconds."""
    integrations = "memd_client.integrations"
    with forks(f"{integrations}.accelerate", f"{integrations}.transformers") as made:
        yield made


def test_the_client_imports_no_training_library(client: Forks) -> None:
    program = "import sys; print({'accelerate', 'lightning', 'transformers'} & set(sys.modules))"
    assert client.run(program) == (0, "set()\n")


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_a_missing_library_is_named_with_what_to_install(client: Forks, library: str) -> None:
    status, said = client.run(
        f"import sys\nsys.modules['{library}'] = None\nimport memd_client.integrations.{library}"
    )
    assert status == 1
    assert said.splitlines()[-1] == (
        f"ModuleNotFoundError: memd_client.integrations.{library} needs {library}: "
        f"pip install {library}"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("self.scaler = object()", "fp16 has a GradScaler"),
        ("self.state.num_processes = 2", "and this Accelerator has 2"),
        ("self.state.distributed_type = DistributedType.FSDP", "FSDP keeps or divides parameters"),
        ("self.state.distributed_type = DistributedType.DEEPSPEED", "DEEPSPEED keeps or divides"),
    ],
)
def test_an_accelerator_that_memd_cannot_keep_is_refused(
    libraries: Forks, change: str, message: str
) -> None:
    """One process and no GPU make none of these: so Accelerate's own constructor says it."""
    status, said = libraries.run(
        "import accelerate\n"
        "from accelerate.utils import DistributedType\n"
        "from types import SimpleNamespace\n"
        "made = accelerate.Accelerator.__init__\n"
        "def make(self, **given):\n"
        "    made(self, **given)\n"
        "    self.state = SimpleNamespace(**vars(self.state))\n"
        f"    {change}\n"
        "accelerate.Accelerator.__init__ = make\n"
        "from memd_client.integrations.accelerate import CommittedAccelerator\n"
        "CommittedAccelerator(session=None, cpu=True)\n"
    )
    assert status == 1
    last = [line for line in said.splitlines() if "InvalidArgument: " in line]
    assert message in last[-1], said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.accelerator.scaler = object()", "fp16 has a GradScaler"),
        (
            "trainer.args.world_size = 2",
            "under a library a job trains in one process in this version, and this Trainer has 2",
        ),
        ("trainer.args.optim = 'adafactor'", "memd has no optimizer for optim='adafactor'"),
    ],
)
def test_trainer_arguments_that_memd_cannot_keep_are_refused(
    libraries: Forks, change: str, message: str
) -> None:
    status, said = libraries.run(
        "from types import SimpleNamespace as Made\n"
        "from memd_client.integrations import transformers\n"
        "class Library:\n"
        "    def __init__(self):\n"
        "        trainer = self\n"
        "        trainer.accelerator = Made(scaler=None)\n"
        "        trainer.args = Made(world_size=1, optim='adamw_torch', learning_rate=1,\n"
        "            adam_beta1=0.9, adam_beta2=0.9, adam_epsilon=1e-8)\n"
        "        trainer.optimizer = trainer.optimizer_cls_and_kwargs = None\n"
        f"        {change}\n"
        "class Trainer(transformers.CommitsSteps, Library): pass\n"
        "Trainer(session=None)\n"
    )
    assert status == 1
    assert f"InvalidArgument: {message}" in said.splitlines()[-1]
