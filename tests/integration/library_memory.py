"""Saves a model that is larger than the job's host memory as a library's checkpoint, and loads it;
says what memory that took, in bytes beyond those of an interpreter with the library imported.

Run: python -m tests.integration.library_memory LIBRARY ADDRESS FOLDER LAYERS PHASE
for the phases `train`, `save` and `load`: the memory of the others is another process's.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import memd_client
from memd_client.base.freed_memory import return_freed_memory
from tests.integration.safetensors_memory import SETTINGS, peak, rss_anon_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

LAYER_BYTES = 8 << 20


class Scale(nn.Module):
    """A layer whose activations are small."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(LAYER_BYTES // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.weight * 1e-3).mean()


def offloaded(session: memd_client.Session, layers: int) -> nn.Module:
    """Layer by layer: a model that is built at once takes its own size."""
    model = nn.ModuleDict()
    for number in range(layers):
        name = str(number)
        layer = memd_client.offload(nn.ModuleDict({name: Scale()}), session, strict=False)
        model[name] = layer[name]
    return nn.Sequential(*model.values())


def accelerate(
    session: memd_client.Session, model: nn.Module, folder: Path, phase: str
) -> Callable[[], Any]:
    library: Any = importlib.import_module("memd_client.integrations.accelerate")
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
    accelerator = library.CommittedAccelerator(session=session, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.resume()

    def train() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1)))
            optimizer.step()
            optimizer.zero_grad()

    return {
        "train": train,
        "save": lambda: accelerator.save_state(folder / "checkpoint"),
        "load": lambda: accelerator.load_state(folder / "checkpoint"),
    }[phase]


def lightning(
    session: memd_client.Session, model: nn.Module, folder: Path, phase: str
) -> Callable[[], Any]:
    package: Any = importlib.import_module("lightning")
    library: Any = importlib.import_module("memd_client.integrations.lightning")

    class Module(package.LightningModule):  # type: ignore[misc] # no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return memd_client.AdamW(self.parameters(), lr=1e-3)

    trainer = package.Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[library.CommitSteps(session)],
        plugins=[library.StreamedCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = folder / "a.ckpt"
    batches: Any = torch.ones(1, 1)
    fit = partial(trainer.fit, Module(), torch.utils.data.DataLoader(batches))
    if phase == "save":
        fit()
        return partial(trainer.save_checkpoint, path)
    return fit if phase == "train" else partial(fit, ckpt_path=path)


def transformers(
    session: memd_client.Session, model: nn.Module, folder: Path, phase: str
) -> Callable[[], Any]:
    package: Any = importlib.import_module("transformers")
    library: Any = importlib.import_module("memd_client.integrations.transformers")

    class Model(package.PreTrainedModel):  # type: ignore[misc] # no types here
        config_class = package.PretrainedConfig

        def __init__(self) -> None:
            super().__init__(package.PretrainedConfig())
            self.model = model
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """They are in memd."""

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(x).mean()}

    arguments = package.TrainingArguments(
        output_dir=folder,
        max_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    rows: Any = [{"x": torch.ones(1)}]
    trainer = library.CommittedTrainer(
        model=Model(), args=arguments, train_dataset=rows, session=session
    )
    if phase == "save":
        trainer.train()
        return partial(trainer._save_checkpoint, trainer.model, trial=None)
    checkpoint = folder / "checkpoint-1" if phase == "load" else None
    return partial(trainer.train, resume_from_checkpoint=checkpoint)


def main(library: str, address: str, folder: Path, layers: int, phase: str) -> None:
    importlib.import_module(f"memd_client.integrations.{library}")
    # Accelerate does when it prepares a model, and torch when it first sees a lazy tensor: 39 MiB.
    importlib.import_module("torch.distributed.tensor")
    base_bytes = rss_anon_bytes()
    torch.manual_seed(0)
    quota = 9 * layers * LAYER_BYTES
    is_first = phase == "train"
    with memd_client.connect(address, job="memory", nvme_bytes=quota, fresh=is_first) as session:
        model = offloaded(session, layers)
        call = globals()[library](session, model, folder, phase)
        return_freed_memory()
        sys.stdout.write(f"model {layers * LAYER_BYTES}\nlargest {LAYER_BYTES}\n")
        sys.stdout.write(f"before_{phase} {rss_anon_bytes() - base_bytes}\n")
        with peak(phase, base_bytes):
            call()


def measured(library: str, address: str, folder: Path) -> dict[str, int]:
    """The bytes that all phases have said, of 12 layers."""
    command = [sys.executable, "-m", "tests.integration.library_memory", library, address, folder]
    said = ""
    for phase in ("train", "save", "load"):
        done = subprocess.run(
            [*map(str, command), "12", phase],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **SETTINGS},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=200,
        )
        said += done.stdout
    return {name: int(value) for name, value in re.findall(r"(\w+) (-?\d+)", said)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
