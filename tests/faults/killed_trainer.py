"""Trains, then stops for ever in the middle of a step, holding leases, with a forked worker beside
it.

Run: python -m tests.faults.killed_trainer ADDRESS JOB STEPS   (test_trainer_killed.py does, and
kills it)
"""

import os
import sys
import time

import torch

import memd_client
from tests.faults.small_training import batch, build, loss_of


def main(address: str, job: str, step_count: int) -> None:
    session = memd_client.connect(address, job=job)
    model = memd_client.offload(build(), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, session=session)
    for step in range(step_count):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    # In mid-step: the first gradients are in the arena, every parameter is leased.
    loss_of(model, batch(step_count)).backward()
    with memd_client.gather(model):
        worker = os.fork()
        if worker == 0:
            time.sleep(600)
            os._exit(0)
        sys.stdout.write(f"holding {session.statistics().leases_held} worker {worker}\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
