"""The trainer of compose.yaml: the first script of docs/training.md."""

import torch

import memd_client

STEPS = 20

session = memd_client.connect(job="first-steps")
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
memd_client.offload(model, session)
optimizer = memd_client.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
session.track(scheduler=scheduler, rng=True)
for step in range(session.resume(), STEPS):
    x = torch.randn(32, 1024)
    loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    session.commit()
    print(step, loss.item(), flush=True)
session.close()
