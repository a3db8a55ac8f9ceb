"""Hugging Face's Trainer over a model whose parameters and optimizer states are in memd.

    python transformers_trainer.py OUT            # with memd: MEMD_ADDRESS, or the node's daemon
    python transformers_trainer.py OUT --plain    # without memd: the same losses and weights
    python transformers_trainer.py OUT --resume   # goes on at the last commit of the job
    python transformers_trainer.py OUT --resume-checkpoint   # at the last checkpoint in OUT

Two lines differ: `offload`, and the Trainer's class, which makes each step a commit. Clipping, the
schedule, evaluation and checkpoints are Trainer's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import memd_client
from memd_client.integrations.transformers import CommittedTrainer


class RandomText(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, the same in every run."""

    def __init__(self, count: int, *, length: int = 32, vocabulary: int = 256) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class PrintLoss(TrainerCallback):  # type: ignore[misc] # transformers has no types
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--resume-checkpoint", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=3, n_head=4)
    )
    settings: dict[str, Any] = {}
    kind = Trainer if options.plain else CommittedTrainer
    if not options.plain:
        settings["session"] = memd_client.connect(
            job="transformers-trainer", fresh=not (options.resume or options.resume_checkpoint)
        )
        memd_client.offload(model, settings["session"])
    trainer = kind(
        model=model,
        args=TrainingArguments(
            output_dir=options.out / "checkpoints",
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            warmup_steps=3,
            lr_scheduler_type="cosine",
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            logging_steps=1,
            logging_nan_inf_filter=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=RandomText(64),
        eval_dataset=RandomText(8),
        callbacks=[PrintLoss()],
        **settings,
    )
    result = trainer.train(resume_from_checkpoint=options.resume_checkpoint or None)
    print(f"mean loss {result.training_loss!r}", flush=True)
    torch.save(model.state_dict(), options.out / "weights.pt")


if __name__ == "__main__":
    main()
