"""The settings of a group of an optimizer: torch's rules, and their message to the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import torch

from memd_client.errors import InvalidArgument
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from memd_client.core.job import Job

_OTHER_KERNELS = (
    *(("foreach", True), ("fused", False)),
    *(("capturable", True), ("differentiable", True)),
)
# The update that a daemon makes if it does not know the setting.
_OLDER_DAEMONS = {"maximize": "minimize", "amsgrad": "update without a maximum"}


def plain_betas(betas: tuple[float | torch.Tensor, float | torch.Tensor]) -> tuple[float, float]:
    """The betas that an optimizer is made with, as its groups have them.

    Raises:
        InvalidArgument: one is a tensor and the other is not, which torch refuses too.
    """
    beta1, beta2 = betas
    if isinstance(beta1, torch.Tensor) != isinstance(beta2, torch.Tensor):
        raise InvalidArgument(
            f"betas must be either both floats or both tensors: {type(beta1).__name__} and "
            f"{type(beta2).__name__}"
        )
    return _number("betas[0]", beta1), _number("betas[1]", beta2)


def refuse_group(group: dict[str, Any], job: Job) -> None:
    """Refuses settings that break torch's rules, that name another implementation, or that the
    daemon does not know. Called at every step, as any code may change a group.
    """
    for name in _OLDER_DAEMONS:
        if group[name]:
            refuse_older_daemon(name, job)
    for name, wrong in _OTHER_KERNELS:
        # torch's fused kernel has no other way of updating for capturable.
        is_ignored = name == "capturable" and group["fused"]
        if group[name] is wrong and not is_ignored:
            raise InvalidArgument(
                f"memd updates with the bits of torch's fused CPU kernel, not of its other "
                f"implementations: leave {name} at its default, not {wrong}"
            )
    settings = adam_settings(group)
    for name, value, fits in (
        ("lr", settings.lr, settings.lr >= 0),
        ("eps", settings.eps, settings.eps >= 0),
        ("betas[0]", settings.beta1, 0 <= settings.beta1 < 1),
        ("betas[1]", settings.beta2, 0 <= settings.beta2 < 1),
        ("weight_decay", settings.weight_decay, settings.weight_decay >= 0),
    ):
        if not fits:
            raise InvalidArgument(
                f"{name} must be at least 0{' and below 1' if 'beta' in name else ''}: {value}"
            )


def refuse_older_daemon(name: str, job: Job) -> None:
    """Raises InvalidArgument if the daemon does not know the setting `name`."""
    if name not in job.adam_settings_known:
        raise InvalidArgument(
            f"job {job.name!r}: the daemon is older than {name}, and would {_OLDER_DAEMONS[name]}; "
            f"update it, or leave {name} False"
        )


def adam_settings(group: dict[str, Any]) -> session_pb2.AdamSettings:
    """The present values, also of tensors."""
    beta1, beta2 = group["betas"]
    return session_pb2.AdamSettings(
        lr=_number("lr", group["lr"]),
        beta1=_number("betas[0]", beta1),
        beta2=_number("betas[1]", beta2),
        eps=_number("eps", group["eps"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=_flag("maximize", group["maximize"]),
        amsgrad=_flag("amsgrad", group["amsgrad"]),
    )


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise _refused_type(name, value, "a bool")
    return value


def _number(name: str, value: float | torch.Tensor) -> float:
    if not isinstance(value, torch.Tensor):
        # Not what else float() takes, such as text: torch's optimizers do not.
        if not isinstance(value, (int, float, numpy.integer, numpy.floating)):
            raise _refused_type(name, value, "a number or a tensor")
        return float(value)
    if value.numel() != 1:
        raise InvalidArgument(
            f"a tensor that is {name} must have 1 element, not {value.numel()}: {list(value.shape)}"
        )
    return float(value.item())


def _refused_type(name: str, value: Any, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must be {expected}, not {type(value).__name__}: {value!r}; change the group. No "
        "update was made or counted (torch's fused optimizer counts one before it raises)"
    )
