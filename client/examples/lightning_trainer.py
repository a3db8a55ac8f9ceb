"""A LightningModule whose parameters and optimizer states are in memd.

    python lightning_trainer.py OUT            # with memd: MEMD_ADDRESS, or the node's daemon
    python lightning_trainer.py OUT --plain    # without memd: the same losses and weights
    python lightning_trainer.py OUT --resume   # goes on at the last commit of the job
    python lightning_trainer.py OUT --resume-checkpoint   # at the last checkpoint in OUT

With memd it has `offload`, another class for the optimizer, a callback that makes each step a
commit, and a plugin that streams checkpoints. The loop, clipping, the schedule and checkpoints are
Lightning's own.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memd_client
from memd_client.integrations.lightning import CommitSteps, StreamedCheckpointIO

if TYPE_CHECKING:
    from collections.abc import Callable


class Regression(lightning.LightningModule):  # type: ignore[misc] # lightning has no types here
    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32)
        )
        self._make_optimizer = make_optimizer

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.net(inputs), wanted)
        print(f"batch {self.global_step * 2 + index % 2 + 1} loss {loss.item()!r}", flush=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        inputs, wanted = batch
        self.log("valid", nn.functional.mse_loss(self.net(inputs), wanted))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self._make_optimizer(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
                "interval": "step",
            },
        }


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(32, 32, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.flip(1)), batch_size=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--resume-checkpoint", action="store_true")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    folder = options.out / "checkpoints"
    callbacks: list[Any] = [ModelCheckpoint(dirpath=folder, save_last=True)]
    plugins: list[Any] = []
    if options.plain:
        model = Regression(partial(torch.optim.AdamW, fused=True))
    else:
        model = Regression(memd_client.AdamW)
        session = memd_client.connect(
            job="lightning-trainer", fresh=not (options.resume or options.resume_checkpoint)
        )
        memd_client.offload(model, session)
        callbacks.append(CommitSteps(session))
        plugins.append(StreamedCheckpointIO())
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=options.out,
        callbacks=callbacks,
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt" if options.resume_checkpoint else None
    trainer.fit(model, make_loader(), make_loader(), ckpt_path=last)
    torch.save(model.state_dict(), options.out / "weights.pt")


if __name__ == "__main__":
    main()
