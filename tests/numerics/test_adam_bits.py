"""memd's updates against torch's: the fused kernel's bits, and a few ulp from its other kernels."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from memd_native._core import AdamSettings, adam_update, adam_update_bf16, isa_names

STEP_COUNT = 100
ULPS_ALLOWED = 4

Array = npt.NDArray[np.float32]
Trajectories = dict[str, npt.NDArray[np.generic]]


def settings(
    beta1: float,
    beta2: float,
    weight_decay: float,
    *,
    decoupled: bool,
    maximize: bool = False,
    amsgrad: bool = False,
) -> AdamSettings:
    return AdamSettings(
        lr=1e-3,
        beta1=beta1,
        beta2=beta2,
        eps=1e-8,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        amsgrad=amsgrad,
    )


SETTINGS = {
    "adamw": settings(0.9, 0.95, 0.1, decoupled=True),
    "adamw_no_decay": settings(0.9, 0.999, 0.0, decoupled=True),
    "adam_l2": settings(0.9, 0.95, 0.0123, decoupled=False),
    "adam_low_beta1": settings(0.3, 0.9, 0.1, decoupled=False),
    "adamw_half_beta1": settings(0.5, 0.99, 0.01, decoupled=True),
    "adamw_zero_beta1": settings(0.0, 0.9, 0.01, decoupled=True),
    "adamw_maximize": settings(0.9, 0.95, 0.1, decoupled=True, maximize=True),
    "adam_l2_maximize": settings(0.4, 0.95, 0.0123, decoupled=False, maximize=True),
    "adamw_amsgrad": settings(0.9, 0.5, 0.1, decoupled=True, amsgrad=True),
    "adam_l2_amsgrad_maximize": settings(
        0.4, 0.5, 0.0123, decoupled=False, maximize=True, amsgrad=True
    ),
}


def run_torch(folder: Path, *, capability: str, kind: str) -> Trajectories:
    path = folder / f"{capability}_{kind}.npz"
    script = Path(__file__).with_name("torch_trajectories.py")
    subprocess.run(
        [sys.executable, str(script), str(path), kind],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        check=True,
        timeout=240,
    )
    with np.load(path) as arrays:
        trajectories: Trajectories = {name: arrays[name] for name in arrays.files}
    if str(trajectories["capability"]) != capability.upper():
        pytest.skip(f"this processor has no {capability}")
    return trajectories


@pytest.fixture(scope="module", params=["avx2", "avx512"])
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trajectories:
    return run_torch(tmp_path_factory.mktemp("fused"), capability=request.param, kind="fused")


@pytest.fixture(scope="module", params=["default fused", "default single", "avx2 single"])
def other_kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Trajectories:
    """torch without vectors, and its update of one tensor after the other (``foreach=False``)."""
    capability, kind = request.param.split()
    return run_torch(tmp_path_factory.mktemp("other"), capability=capability, kind=kind)


def rows_of(trajectories: Trajectories, case: str) -> tuple[Array, Array, Array, Array, Array]:
    """(parameter, exp_avg, exp_avg_sq, max_exp_avg_sq) [steps + 1, elements], then gradients
    [steps, elements]."""
    names = ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    parameter, exp_avg, exp_avg_sq, maximum, gradients = (
        trajectories[name].astype(np.float32, copy=False)
        for name in (*(f"{case}/{name}" for name in names), "gradients")
    )
    return parameter, exp_avg, exp_avg_sq, maximum, gradients


def maximum_for(case: str, maximum: Array) -> Array | None:
    return maximum if "amsgrad" in case else None


def different_bits(actual: Array, expected: Array) -> int:
    return int((actual.view(np.uint32) != expected.view(np.uint32)).sum())


def ulps(actual: Array, expected: Array, scale: Array) -> float:
    """Largest difference in units of the last place of `scale`; equal infinities differ by none."""
    differs = actual != expected
    if not differs.any():
        return 0.0
    difference = np.abs(actual[differs].astype(np.float64) - expected[differs].astype(np.float64))
    return float((difference / np.spacing(np.abs(scale[differs])).astype(np.float64)).max())


def assert_one_step_is_close(trajectories: Trajectories, case: str, *, isa: str) -> None:
    parameter, exp_avg, exp_avg_sq, maximum, gradients = rows_of(trajectories, case)
    assert not np.isnan(parameter).any()
    decoupled = case.startswith("adamw")
    worst = {"parameter": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    for t in range(1, STEP_COUNT + 1):
        p, m, v, v_max = (rows[t - 1].copy() for rows in (parameter, exp_avg, exp_avg_sq, maximum))
        p_old, m_old = p.copy(), m.copy()
        g = gradients[t - 1].copy()
        adam_update(isa, SETTINGS[case], t, p, m, v, g, maximum_for(case, v_max))
        p_torch, m_torch, v_torch = (rows[t] for rows in (parameter, exp_avg, exp_avg_sq))
        distances = {
            "parameter": ulps(p, p_torch, np.maximum(np.abs(p_torch), np.abs(p_torch - p_old))),
            # A difference of moments may cancel, so the error has its terms' size. Adam's L2 term
            # may cancel with the gradient before that, which leaves the moments no scale at all.
            "exp_avg": ulps(m, m_torch, np.maximum(np.abs(m_old), np.abs(g))) if decoupled else 0.0,
            "exp_avg_sq": ulps(v, v_torch, v_torch) if decoupled else 0.0,
        }
        worst = {name: max(worst[name], distances[name]) for name in worst}
    assert max(worst.values()) <= ULPS_ALLOWED, worst


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("case", SETTINGS)
def test_hundred_steps_have_the_bits_of_torchs_fused_kernel(
    fused: Trajectories, case: str, isa: str
) -> None:
    if isa not in isa_names():
        pytest.skip(f"this processor has no {isa}")
    *rows_of_state, gradients = rows_of(fused, case)
    p, m, v, v_max = (rows[0].copy() for rows in rows_of_state)
    exp_avg_sq = rows_of_state[2]
    assert np.isfinite(exp_avg_sq[-1]).mean() > 0.7  # an infinite one holds its parameter still
    for t in range(1, STEP_COUNT + 1):
        gradient = gradients[t - 1].copy()
        adam_update(isa, SETTINGS[case], t, p, m, v, gradient, maximum_for(case, v_max))
        differences = [
            different_bits(ours, rows[t])
            for ours, rows in zip((p, m, v, v_max), rows_of_state, strict=True)
        ]
        assert not any(differences), f"(parameter, exp_avg, exp_avg_sq, maximum) after step {t}"


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("case", SETTINGS)
def test_one_step_is_within_four_ulp_of_torchs_other_kernels(
    other_kernel: Trajectories, case: str, isa: str
) -> None:
    assert_one_step_is_close(other_kernel, case, isa=isa)


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("case", ["adamw", "adamw_amsgrad"])
def test_bf16_moves_as_fp32_does_with_the_same_gradients(case: str, isa: str) -> None:
    random = np.random.default_rng(3)
    start = random.standard_normal(1005).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    half = (start >> 16).astype(np.uint16)
    remainder = np.zeros(1005, np.int16)
    p = start.view(np.float32).copy()
    m_bf16, v_bf16, max_bf16, m, v, v_max = (np.zeros(1005, np.float32) for _ in range(6))
    for t in range(1, 21):
        gradient = (random.standard_normal(1005).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        wide = (gradient.astype(np.uint32) << 16).view(np.float32)
        adam_update_bf16(
            isa,
            SETTINGS[case],
            t,
            half,
            remainder,
            m_bf16,
            v_bf16,
            gradient,
            maximum_for(case, max_bf16),
        )
        adam_update(isa, SETTINGS[case], t, p, m, v, wide, maximum_for(case, v_max))
    rebuilt = (half.astype(np.uint32) << 16) + remainder.astype(np.int32).view(np.uint32)
    assert different_bits(rebuilt.view(np.float32), p) == 0
    assert different_bits(m_bf16, m) == 0
    assert different_bits(v_bf16, v) == 0
    assert different_bits(max_bf16, v_max) == 0
    assert bool((v_max > v).any()) == ("amsgrad" in case)


def test_an_update_names_what_is_wrong_with_its_arguments() -> None:
    p, m, v, g = (np.zeros(4, np.float32) for _ in range(4))
    with pytest.raises(ValueError, match=r"isa_names\(\).*sse9"):
        adam_update("sse9", SETTINGS["adamw"], 1, p, m, v, g)
    with pytest.raises(ValueError, match="counts from 1: 0"):
        adam_update("plain", SETTINGS["adamw"], 0, p, m, v, g)
    with pytest.raises(ValueError, match="gradient must be as long as exp_avg: 3 against 4"):
        adam_update("plain", SETTINGS["adamw"], 1, p, m, v, g[:3])
    with pytest.raises(TypeError):
        adam_update("plain", SETTINGS["adamw"], 1, p, m, v, g[::2])
    with pytest.raises(ValueError, match="max_exp_avg_sq is given with amsgrad"):
        adam_update("plain", SETTINGS["adamw_amsgrad"], 1, p, m, v, g)
    with pytest.raises(ValueError, match="max_exp_avg_sq is given with amsgrad"):
        adam_update("plain", SETTINGS["adamw"], 1, p, m, v, g, g.copy())
    with pytest.raises(ValueError, match="max_exp_avg_sq must be as long as exp_avg: 3 against 4"):
        adam_update("plain", SETTINGS["adamw_amsgrad"], 1, p, m, v, g, np.zeros(3, np.float32))
    assert not p.any()
