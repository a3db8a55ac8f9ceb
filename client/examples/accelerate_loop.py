"""A training loop of Hugging Face's Accelerate over a model that is in memd.

    python accelerate_loop.py OUT            # with memd: MEMD_ADDRESS, or the node's daemon
    python accelerate_loop.py OUT --plain    # without memd: the same losses and weights
    python accelerate_loop.py OUT --resume   # goes on at the last commit of the job
    python accelerate_loop.py OUT --resume-checkpoint   # at the last checkpoint in OUT

With memd it has `offload`, other classes for the optimizer and the Accelerator, and `resume`.
`prepare`, `accumulate`, `clip_grad_norm_`, `save_state` and `load_state` are as in Accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memd_client
from memd_client.integrations.accelerate import CommittedAccelerator

EPOCHS = 2
SAVE_EVERY = 4


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(48, 32, generator=generator)
    return TensorDataset(inputs, inputs.flip(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--resume-checkpoint", action="store_true")
    options = parser.parse_args()

    set_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(256), nn.Linear(256, 32)
    )
    if options.plain:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-2, fused=True
        )
    else:
        session = memd_client.connect(
            job="accelerate-loop", fresh=not (options.resume or options.resume_checkpoint)
        )
        memd_client.offload(model, session)
        accelerator = CommittedAccelerator(session=session, cpu=True, gradient_accumulation_steps=2)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader = DataLoader(make_data(), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    checkpoint = options.out / "checkpoint"
    epoch = step = 0
    if not options.plain:
        position = accelerator.resume()
        if options.resume_checkpoint:
            position = accelerator.load_state(checkpoint)
        epoch = position.epoch
        step = (position.epoch * len(loader) + position.batch) // 2
    loss_sum = 0.0
    for _ in range(epoch, EPOCHS):
        for inputs, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loss_sum += loss.item()
            if accelerator.sync_gradients:
                step += 1
                print(f"step {step} loss {loss_sum!r}", flush=True)
                loss_sum = 0.0
                if step % SAVE_EVERY == 0:
                    accelerator.save_state(checkpoint)
    torch.save(accelerator.unwrap_model(model).state_dict(), options.out / "weights.pt")


if __name__ == "__main__":
    main()
