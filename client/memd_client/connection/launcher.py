"""The ranks' launcher, as the environment tells of it."""

from __future__ import annotations

import os
import warnings

from memd_client.errors import InvalidArgument


def refuse_others() -> None:
    """For a process without a process group.

    Raises:
        InvalidArgument: its launcher has started others, each of which would train a job of one
            rank on its own share of the data.
    """
    started = os.environ.get("WORLD_SIZE", "")
    if started.isdecimal() and int(started) > 1:
        raise InvalidArgument(
            f"WORLD_SIZE is {started}, and no process group says who averages gradients; call "
            "torch.distributed.init_process_group() before connect(), or pass world_size=1 if this "
            "process works alone"
        )


def warn_of_kept_store() -> None:
    """For a rank, if torchrun may start it again and then keeps the store of the start before.

    There each rank of gloo reads where the others listen. One that comes first after a restart
    finds the address of a process that has ended: it is refused, or both wait for half an hour.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_kept and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        warnings.warn(
            "torchrun keeps its store when it starts ranks again, and a rank that finds an ended "
            "one's address there cannot connect, or hangs. Give each start a store of its own: run "
            "`torchrun --standalone` with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment",
            stacklevel=4,
        )
