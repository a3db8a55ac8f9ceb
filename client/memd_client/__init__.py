"""Training state in memd: a daemon keeps parameters, gradients and optimizer states in host memory
and on NVMe, and provides them when they are used.

    session = memd_client.connect(job="gpt-finetune")
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters(), lr=3e-4)

The rest of the training loop does not change.
"""

from typing import TYPE_CHECKING, Any

from memd_client.base.statistics import SessionStatistics
from memd_client.connect import connect
from memd_client.deepspeed import from_deepspeed
from memd_client.errors import (
    CapacityError,
    DaemonFailed,
    DaemonUnavailable,
    DeadlineExceeded,
    DeviceError,
    IntegrityError,
    InvalidArgument,
    MemdError,
    NotDurable,
    NotResident,
    NotYet,
    PermissionDenied,
    SessionFenced,
    UnknownName,
)
from memd_client.gather import gather
from memd_client.init import init
from memd_client.load_safetensors import load_safetensors
from memd_client.offload import offload
from memd_client.optimizer import Adam, AdamW
from memd_client.optimizer_safetensors import (
    load_optimizer_safetensors,
    save_optimizer_safetensors,
)
from memd_client.reduce_hook import reduce_hook
from memd_client.save_safetensors import save_safetensors
from memd_client.session import Session
from memd_client.tile_linears import tile_linears

if TYPE_CHECKING:
    from memd_client import checkpoint

__all__ = [
    "Adam",
    "AdamW",
    "CapacityError",
    "DaemonFailed",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "DeviceError",
    "IntegrityError",
    "InvalidArgument",
    "MemdError",
    "NotDurable",
    "NotResident",
    "NotYet",
    "PermissionDenied",
    "Session",
    "SessionFenced",
    "SessionStatistics",
    "UnknownName",
    "checkpoint",
    "connect",
    "from_deepspeed",
    "gather",
    "init",
    "load_optimizer_safetensors",
    "load_safetensors",
    "offload",
    "reduce_hook",
    "save_optimizer_safetensors",
    "save_safetensors",
    "tile_linears",
]


def __getattr__(name: str) -> Any:
    # With it come torch's distributed modules, which take a second that few programs need.
    if name == "checkpoint":
        import memd_client.checkpoint as module

        return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
