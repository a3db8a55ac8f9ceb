"""Runs torch's Adam and AdamW, saves every state: ``torch_trajectories.py OUT.npz fused|single``.

A program of its own, as torch chooses its instruction set on import (``ATEN_CPU_CAPABILITY``).

Saved: ``capability``; ``gradients`` [steps, elements]; ``<case>/<parameter|exp_avg|exp_avg_sq>``
for each case, [steps + 1, elements], fp32, row 0 before the first step.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

STEP_COUNT = 100
# torch computes whole vectors of 8, and the last 5 one by one.
ELEMENT_COUNT = 1037

SMALL = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -3e-39, 1.2e-38, 1e-30, -1e-20)
LARGE = (1e15, -1e18)  # squares that fp32 still holds
HUGE = (1e19, -2e19, 1e30, -3e38)  # exp_avg_sq overflows at once or after a while, for good

Array = npt.NDArray[np.float32]


def cases() -> dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    """Name → optimizer and its settings, as `test_adam_bits.SETTINGS` spells them too."""
    return {
        "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}),
        "adamw_no_decay": (torch.optim.AdamW, {"betas": (0.9, 0.999), "weight_decay": 0.0}),
        "adam_l2": (torch.optim.Adam, {"betas": (0.9, 0.95), "weight_decay": 0.0123}),
        "adam_low_beta1": (torch.optim.Adam, {"betas": (0.3, 0.9), "weight_decay": 0.1}),
        "adamw_half_beta1": (torch.optim.AdamW, {"betas": (0.5, 0.99), "weight_decay": 0.01}),
        "adamw_zero_beta1": (torch.optim.AdamW, {"betas": (0.0, 0.9), "weight_decay": 0.01}),
        "adamw_maximize": (
            torch.optim.AdamW,
            {"betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": True},
        ),
        "adam_l2_maximize": (
            torch.optim.Adam,
            {"betas": (0.4, 0.95), "weight_decay": 0.0123, "maximize": True},
        ),
        # A short memory, so that the maximum is seldom the last one.
        "adamw_amsgrad": (
            torch.optim.AdamW,
            {"betas": (0.9, 0.5), "weight_decay": 0.1, "amsgrad": True},
        ),
        "adam_l2_amsgrad_maximize": (
            torch.optim.Adam,
            {
                "betas": (0.4, 0.5),
                "weight_decay": 0.0123,
                "amsgrad": True,
                "maximize": True,
            },
        ),
    }


def make_gradients() -> Array:
    """Normal numbers over many magnitudes, a fifth of them small instead; every 16th element also
    sees large ones, every 16th huge ones, and every 17th nothing but zero."""
    random = np.random.default_rng(1)
    shape = (STEP_COUNT, ELEMENT_COUNT)
    gradients = random.standard_normal(shape) * 10.0 ** random.integers(-8, 5, shape)
    small = random.random(shape) < 0.2
    gradients[small] = random.choice(SMALL, shape)[small]
    for first, choices in ((3, LARGE), (5, HUGE)):
        column = gradients[:, first::16]
        often = random.random(column.shape) < 0.1
        column[often] = random.choice(choices, column.shape)[often]
    gradients[:, ::17] = 0.0
    return gradients.astype(np.float32)


def trajectory(case: str, gradients: Array, *, fused: bool) -> dict[str, Array]:
    optimizer_type, settings = cases()[case]
    start = np.random.default_rng(2).standard_normal(ELEMENT_COUNT).astype(np.float32)
    start[:4] = (0.0, -0.0, 1e-40, 1e30)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    kind: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    optimizer = optimizer_type([parameter], lr=1e-3, eps=1e-8, **settings, **kind)  # type: ignore[call-arg]
    rows: dict[str, list[Array]] = {
        "parameter": [start],
        "exp_avg": [np.zeros(ELEMENT_COUNT, np.float32)],
        "exp_avg_sq": [np.zeros(ELEMENT_COUNT, np.float32)],
        "max_exp_avg_sq": [np.zeros(ELEMENT_COUNT, np.float32)],
    }
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        rows["parameter"].append(parameter.detach().numpy().copy())
        state = optimizer.state[parameter]
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            # Without amsgrad there is no maximum, and it stays zero.
            rows[name].append(state[name].numpy().copy() if name in state else rows[name][-1])
    return {f"{case}/{name}": np.stack(values) for name, values in rows.items()}


def main(path: Path, *, fused: bool) -> None:
    gradients = make_gradients()
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "capability": np.array(torch.backends.cpu.get_cpu_capability()),
        "gradients": gradients,
    }
    for case in cases():
        arrays |= trajectory(case, gradients, fused=fused)
    np.savez(path, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), fused=sys.argv[2] == "fused")
