"""DeepSpeed's configurations in memd's words. Expected values are those of DeepSpeed 0.19's
documentation and defaults."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_client import InvalidArgument, from_deepspeed
from memd_client.base.address import EmbeddedAddress, parse_address

if TYPE_CHECKING:
    from pathlib import Path

DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
ZERO3: dict[str, Any] = {
    "stage": 3,
    "offload_param": {"device": "nvme", "nvme_path": "/local nvme"},
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local nvme"},
}


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMD_ADDRESS", raising=False)


NVME = {"device": "nvme"}


class Converted:
    """A configuration in memd's words, and the log beside it."""

    def __init__(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
    ) -> None:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="memd_client"):
            self.result = from_deepspeed(path)
        self.said = caplog.text


@pytest.fixture
def convert(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    return lambda **config: Converted(tmp_path, caplog, config)


def adam(**params: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": params}


def test_zero_3_with_nvme_is_a_private_daemon_in_its_folder(convert: Any) -> None:
    converted = convert(zero_optimization=ZERO3, optimizer=adam(lr=3e-4, betas=[0.8, 0.99]))
    assert converted.result == {
        "connect": {"address": "embedded:/local%20nvme"},
        "offload": {"tier": "nvme"},
        "optimizer": {**DEFAULTS, "lr": 3e-4, "betas": (0.8, 0.99), "tier": "nvme"},
    }
    address = parse_address(converted.result["connect"]["address"])
    assert isinstance(address, EmbeddedAddress)
    assert str(address.data) == "/local nvme"


@pytest.mark.parametrize(
    ("zero", "offload", "optimizer", "said"),
    [
        ({"stage": 3, "offload_param": {"device": "cpu"}}, {"tier": "host"}, {}, ""),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}, {"tier": "host"}, "leave offl"),
        (
            {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": NVME},
            {"tier": "nvme"},
            {"tier": "nvme"},
            "zero_optimization.offload_param.device (parameters and their states",
        ),
        (
            {"stage": 3, "offload_param": NVME, "offload_optimizer": {"device": "cpu"}},
            {"tier": "nvme"},
            {"tier": "nvme"},
            "zero_optimization.offload_optimizer.device (parameters and their states",
        ),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, {}, {}, "uses it in stage 3"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, {}, {}, "in stage 1 or 2 or 3"),
        ({"stage": 2, "cpu_offload": True}, {}, {"tier": "host"}, "leave offload() out"),
        ({"stage": 3, "cpu_offload_param": True}, {"tier": "host"}, {}, ""),
        ({"stage": 3, "offload_param": {"device": "none"}}, {}, {}, "leave offload() out"),
    ],
)
def test_each_device_and_stage_has_its_tier(
    convert: Any, zero: Any, offload: Any, optimizer: Any, said: str
) -> None:
    converted = convert(zero_optimization=zero)
    assert converted.result == {"connect": {}, "offload": offload, "optimizer": optimizer}
    assert said in converted.said


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (adam(), {}),
        (adam(lr=1e-4, eps=1e-6, weight_decay=0.1, amsgrad=True), None),
        ({"type": "Adam", "params": {"weight_decay": 0.1}}, {"weight_decay": 0.1}),
        (adam(torch_adam=True), {"weight_decay": 0.01}),
        (
            {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}},
            {"decoupled_weight_decay": False},
        ),
    ],
)
def test_settings_of_adam_are_deepspeeds(convert: Any, optimizer: Any, expected: Any) -> None:
    expected = optimizer["params"] if expected is None else expected
    assert convert(optimizer=optimizer).result["optimizer"] == {**DEFAULTS, **expected}


def test_adam_with_l2_is_refused_by_adamw_and_taken_by_adam(convert: Any) -> None:
    converted = convert(
        optimizer={"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}
    )
    settings = converted.result["optimizer"]
    assert "pass these settings to memd_client.Adam" in converted.said
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        memd_client.AdamW(parameters, **settings)
    # It goes as far as asking for the session.
    with pytest.raises(InvalidArgument, match="session"):
        memd_client.Adam(parameters, **settings)


def test_automatic_values_are_left_out_and_named(convert: Any) -> None:
    converted = convert(optimizer=adam(lr="auto", weight_decay="auto", eps=1e-6))
    assert converted.result["optimizer"] == {
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "amsgrad": False,
    }
    assert 'optimizer.params.lr (it is "auto"' in converted.said
    assert 'optimizer.params.weight_decay (it is "auto"' in converted.said


def test_what_is_ignored_is_named_once_with_what_to_do(convert: Any) -> None:
    converted = convert(
        zero_optimization={
            **ZERO3,
            "sub_group_size": 10,
            "stage3_max_live_parameters": 10,
            "zero_quantized_weights": True,
            "round_robin_gradients": False,
            "offload_param": {**ZERO3["offload_param"], "max_in_cpu": 100, "pin_memory": True},
        },
        gradient_clipping=1.0,
        bf16={"enabled": True},
        fp16={"enabled": False},
        flops_profiler={"enabled": True},
        steps_per_print=10,
    )
    for said in (
        "zero_optimization.sub_group_size (the daemon plans",
        "zero_optimization.stage3_max_live_parameters (a module's",
        "zero_optimization.offload_param.max_in_cpu (connect(host_bytes=",
        "zero_optimization.offload_param.pin_memory (the daemon plans",
        "zero_optimization.zero_quantized_weights",
        "gradient_clipping (call optimizer.clip_grad_norm_()",
        "bf16 (convert the model",
        "flops_profiler",
        "steps_per_print",
    ):
        assert converted.said.count(said) == 1, said
    for quiet in ("fp16", "round_robin_gradients", "nvme_path", "device"):
        assert quiet not in converted.said, quiet


def test_nothing_is_said_of_a_configuration_that_is_taken_whole(convert: Any) -> None:
    assert convert(zero_optimization=ZERO3, optimizer=adam(lr=1e-3)).said == ""


def test_a_daemon_that_the_environment_names_is_used(
    convert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_ADDRESS", "unix:///run/memd/memd.sock")
    converted = convert(zero_optimization=ZERO3)
    assert converted.result["connect"] == {}
    assert "MEMD_ADDRESS names a daemon" in converted.said


def test_one_folder_has_all_bytes(convert: Any) -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/a"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
    }
    converted = convert(zero_optimization=zero)
    assert converted.result["connect"] == {"address": "embedded:/b"}
    assert "offload_param.nvme_path (all bytes are in /b)" in converted.said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a DeepSpeed configuration"),
        ("[]", "no JSON object"),
        ('{"bf16": {}, "bf16": {}}', "it has 'bf16' twice"),
        ('{"zero_optimization": true}', "zero_optimization is not a JSON object: True"),
        ('{"optimizer": {"type": "Lamb"}}', "optimizer.type is 'Lamb'"),
        ('{"optimizer": {"type": 1}}', "optimizer.type is 1"),
        (
            '{"optimizer": {"type": "Adam", "params": {"bias_correction": false}}}',
            "optimizer.params.bias_correction is False",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}',
            "offload_param.device is none, cpu or nvme: 'disk'",
        ),
        (
            '{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "here"}}}',
            "offload_param.nvme_path is an absolute path: 'here'",
        ),
        ('{"zero_optimization": {"offload_param": 3}}', "offload_param is not a JSON object: 3"),
    ],
)
def test_what_is_no_configuration_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as refused:
        from_deepspeed(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        from_deepspeed(tmp_path / "absent.json")
