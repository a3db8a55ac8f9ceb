"""LoRA with PEFT: the frozen base model and the adapters are in memd, only adapters are trained.

    python peft_lora.py OUT            # with memd: MEMD_ADDRESS, or the node's daemon
    python peft_lora.py OUT --plain    # without memd: the same losses and weights
    python peft_lora.py OUT --resume   # goes on at the last adapter that was saved in OUT

Three lines differ: `offload`, the optimizer's class, and `gather`, which makes parameters ordinary
while the adapters are merged.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import memd_client

STEP_COUNT = 12
SAVE_EVERY = 4


def batch(step: int) -> torch.Tensor:
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    set_seed(0)
    base = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=32,
            n_embd=64,
            n_layer=3,
            n_head=4,
            embd_pdrop=0.0,  # the checkpoint has no random numbers
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.0)
    )
    if options.plain:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-2, fused=True
        )
    else:
        session = memd_client.connect(job="peft-lora")
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)

    checkpoint = options.out / "adapter"
    first = 0
    if options.resume:
        set_peft_model_state_dict(model, load_peft_weights(str(checkpoint), device="cpu"))
        saved = torch.load(checkpoint / "training.pt", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, STEP_COUNT):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            model.save_pretrained(str(checkpoint))
            torch.save(
                {"step": step + 1, "optimizer": optimizer.state_dict()}, checkpoint / "training.pt"
            )

    # With the adapters merged into the base, the model computes the same in fewer operations.
    with nullcontext() if options.plain else memd_client.gather(model, write=True):
        model.merge_adapter()
    with torch.no_grad():
        loss = model(input_ids=batch(0), labels=batch(0)).loss
    print(f"merged loss {loss.item()!r}", flush=True)
    torch.save(model.state_dict(), options.out / "weights.pt")


if __name__ == "__main__":
    main()
