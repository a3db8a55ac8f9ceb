"""DeepSpeed's configuration in memd's words."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from memd_client.base.address import VARIABLE
from memd_client.errors import InvalidArgument

_log = logging.getLogger("memd_client")

# Deprecated names, by what they stand for.
_OLD_NAMES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
_OFFLOADS = ("offload_optimizer", "offload_param")
# memd does these without being asked, or does not need them: the values have no effect.
_ALWAYS = {
    **dict.fromkeys(
        (
            *("zero_optimization.contiguous_gradients", "zero_optimization.overlap_comm"),
            *("zero_optimization.cpu_offload_use_pin_memory",),
            *("zero_optimization.sub_group_size", "zero_optimization.stage3_prefetch_bucket_size"),
            *("zero_optimization.stage3_max_reuse_distance",),
            *("zero_optimization.stage3_param_persistence_threshold",),
            *("zero_optimization.stage3_model_persistence_threshold",),
            *("zero_optimization.offload_param.buffer_count",),
            *("zero_optimization.offload_param.buffer_size",),
            *("zero_optimization.offload_param.pin_memory",),
            *("zero_optimization.offload_optimizer.buffer_count",),
            *("zero_optimization.offload_optimizer.pin_memory",),
            *("zero_optimization.offload_optimizer.pipeline_read",),
            *("zero_optimization.offload_optimizer.pipeline_write",),
            *("zero_optimization.offload_optimizer.fast_init", "aio"),
        ),
        "the daemon plans reads, writes and buffers itself",
    ),
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "your loop decides when it calls backward() and step()",
    ),
    "gradient_clipping": "call optimizer.clip_grad_norm_() before step()",
    "bf16": "convert the model with model.bfloat16(), or use torch.autocast",
    "fp16": "use torch.autocast with torch.amp.GradScaler",
    "torch_autocast": "use torch.autocast",
    "scheduler": "make one of torch.optim.lr_scheduler",
    "zero_optimization.offload_param.max_in_cpu": (
        "connect(host_bytes=…) bounds parameters, gradients and states together"
    ),
    "zero_optimization.stage3_max_live_parameters": "a module's parameters are there while it runs",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "state_dict() and save_safetensors() have whole parameters"
    ),
    "activation_checkpointing": "use torch.utils.checkpoint",
    "zero_allow_untested_optimizer": "there is no other optimizer here",
    "zero_force_ds_cpu_optimizer": "memd's is the only optimizer here",
}
_ADAM_MODES = {"adam_w_mode": True, "bias_correction": True}
# DeepSpeed's own, which are not torch's: AdamW has a weight_decay of 0.01 there.
_ADAM_SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_TORCH_WEIGHT_DECAY = 0.01
# They choose one of DeepSpeed's kernels, and change no number beyond rounding.
_ADAM_KERNELS = ("torch_adam", "fused", "foreach", "fp32_optimizer_states")


def from_deepspeed(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Reads a DeepSpeed configuration. What it ignores it logs as a warning, each key with what to
    do instead.

        config = memd_client.from_deepspeed("ds_config.json")
        session = memd_client.connect(job="gpt", **config["connect"])
        memd_client.offload(model, session, **config["offload"])
        optimizer = memd_client.AdamW(model.parameters(), session=session, **config["optimizer"])

    Args:
        path: a JSON file.

    Returns:
        Keyword arguments. `connect`: an address that keeps the bytes in `nvme_path`, unless
        MEMD_ADDRESS names a daemon; for other sizes than 1 GiB of memory and 2 GiB of disk append
        "?host=64GiB&nvme=1TiB" to it. `offload`: its tier. `optimizer`: its settings and tier;
        where the configuration asks for Adam with L2 regularization, those of `memd_client.Adam`,
        which `AdamW` refuses. Values of "auto" are left out.

    Raises:
        InvalidArgument: the file is no such configuration, or asks for an optimizer that memd does
            not have.
        OSError: the file can't be read.
    """
    return _Conversion(Path(path)).convert()


class _Conversion:
    """One file, and what is said about it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ignored: list[str] = []

    def convert(self) -> dict[str, dict[str, Any]]:
        config = self._read()
        zero = self._section(config, "zero_optimization")
        offloads = {name: self._offload(zero, name) for name in _OFFLOADS}
        converted = {
            "connect": self._connect(offloads),
            "offload": self._tier(zero, offloads, "offload_param"),
            "optimizer": {
                **self._adam(self._section(config, "optimizer")),
                **self._tier(zero, offloads, "offload_optimizer"),
            },
        }
        self._join_tiers(converted["offload"], converted["optimizer"])
        self._ignore(zero, "zero_optimization.", mapped=("stage", *_OFFLOADS, *_OLD_NAMES))
        self._ignore(config, "", mapped=("zero_optimization", "optimizer"))
        if self._ignored:
            _log.warning(
                "%s: memd ignores %s", self._path, "; ".join(sorted(self._ignored, key=str.lower))
            )
        return converted

    def _read(self) -> dict[str, Any]:
        try:
            config = json.loads(
                self._path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates
            )
        except ValueError as error:
            raise InvalidArgument(
                f"{self._path} is not a DeepSpeed configuration: {error}"
            ) from error
        if not isinstance(config, dict):
            raise InvalidArgument(f"{self._path} is not a DeepSpeed configuration: no JSON object")
        return config

    def _section(self, config: dict[str, Any], name: str) -> dict[str, Any]:
        section = config.get(name)
        if section is None:
            return {}
        if not isinstance(section, dict):
            raise InvalidArgument(f"{self._path}: {name} is not a JSON object: {section!r}")
        return section

    def _offload(self, zero: dict[str, Any], name: str) -> dict[str, Any]:
        """The section, or what an old name stands for."""
        offload = self._section(zero, name)
        for old, new in _OLD_NAMES.items():
            if new == name and zero.get(old):
                offload = {"device": "cpu", **offload}
        device = offload.get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise InvalidArgument(
                f"{self._path}: zero_optimization.{name}.device is none, cpu or nvme: {device!r}"
            )
        self._ignore(offload, f"zero_optimization.{name}.", mapped=("device", "nvme_path"))
        return offload

    def _connect(self, offloads: dict[str, dict[str, Any]]) -> dict[str, Any]:
        paths = {
            f"zero_optimization.{name}.nvme_path": offload["nvme_path"]
            for name, offload in offloads.items()
            if offload.get("device") == "nvme" and offload.get("nvme_path") is not None
        }
        if not paths:
            return {}
        if os.environ.get(VARIABLE):
            for key in paths:
                self._say(key, f"{VARIABLE} names a daemon, which has volumes of its own")
            return {}
        (first, folder), *others = paths.items()
        if not isinstance(folder, str) or not Path(folder).is_absolute():
            raise InvalidArgument(f"{self._path}: {first} is an absolute path: {folder!r}")
        for key, other in others:
            if other != folder:
                self._say(key, f"all bytes are in {folder}")
        return {"address": f"embedded:{quote(folder)}"}

    def _tier(
        self, zero: dict[str, Any], offloads: dict[str, dict[str, Any]], name: str
    ) -> dict[str, Any]:
        device = offloads[name].get("device", "none")
        stages = {"offload_param": (3,), "offload_optimizer": (1, 2, 3)}[name]
        key = f"zero_optimization.{name}"
        if device == "none":
            if name == "offload_param":
                self._say(key, "it offloads no parameters, so leave offload() out")
            return {}
        if zero.get("stage", 0) not in stages:
            self._say(
                f"{key}.device", f"DeepSpeed uses it in stage {' or '.join(map(str, stages))}"
            )
            return {}
        return {"tier": "host" if device == "cpu" else "nvme"}

    def _join_tiers(self, offload: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """The optimizer's state of an offloaded parameter lives in its tier."""
        if {offload.get("tier"), optimizer.get("tier")} != {"host", "nvme"}:
            return
        key = "offload_param" if offload["tier"] == "host" else "offload_optimizer"
        self._say(
            f"zero_optimization.{key}.device",
            'parameters and their states are in one tier, "nvme", which keeps in host memory what '
            "fits there",
        )
        offload["tier"] = optimizer["tier"] = "nvme"

    def _adam(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        name = optimizer.get("type")
        if name is None:
            return {}
        if not isinstance(name, str) or name.lower() not in ("adam", "adamw"):
            raise InvalidArgument(
                f"{self._path}: memd has the optimizers Adam and AdamW: optimizer.type is {name!r}"
            )
        params = {**_ADAM_MODES, **self._section(optimizer, "params")}
        if params["bias_correction"] is not True:
            raise InvalidArgument(
                f"{self._path}: memd's Adam always corrects its bias: "
                f"optimizer.params.bias_correction is {params['bias_correction']!r}"
            )
        # DeepSpeed's "Adam" is AdamW unless it is told otherwise.
        is_plain_adam = name.lower() == "adam" and params["adam_w_mode"] is False
        defaults = dict(_ADAM_SETTINGS)
        if params.get("torch_adam") is True and not is_plain_adam:
            defaults["weight_decay"] = _TORCH_WEIGHT_DECAY
        settings = {
            key: value
            for key, value in {**defaults, "amsgrad": False, **params}.items()
            if key in (*_ADAM_SETTINGS, "amsgrad")
            and not self._is_automatic(f"optimizer.params.{key}", value)
        }
        if isinstance(settings.get("betas"), list):
            settings["betas"] = tuple(settings["betas"])
        if is_plain_adam:
            settings["decoupled_weight_decay"] = False
            self._say("optimizer.params.adam_w_mode", "pass these settings to memd_client.Adam")
        self._ignore(
            params,
            "optimizer.params.",
            mapped=(*_ADAM_MODES, *_ADAM_SETTINGS, "amsgrad", *_ADAM_KERNELS),
        )
        self._ignore(optimizer, "optimizer.", mapped=("type", "params"))
        return settings

    def _is_automatic(self, key: str, value: Any) -> bool:
        if value != "auto":
            return False
        self._say(key, 'it is "auto", so give it yourself')
        return True

    def _ignore(self, section: dict[str, Any], prefix: str, *, mapped: tuple[str, ...]) -> None:
        for name, value in section.items():
            if name not in mapped and not _is_off(value):
                self._say(f"{prefix}{name}", _ALWAYS.get(f"{prefix}{name}", ""))

    def _say(self, key: str, instead: str) -> None:
        self._ignored.append(f"{key} ({instead})" if instead else key)


def _is_off(value: Any) -> bool:
    """Whether a key asks for nothing."""
    if isinstance(value, dict):
        return value.get("enabled") is False or not value
    return value is None or value is False


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As DeepSpeed reads it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"it has {', '.join(map(repr, twice))} twice")
    return found
