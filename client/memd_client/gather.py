"""Parameters as ordinary tensors, for inspection or modification."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from memd_client.base.dynamo import untraced
from memd_client.core.leases import MODE_READ, MODE_WRITE
from memd_client.parameters.gathered_tiles import gathered
from memd_client.parameters.parameter import fetched, streamed
from memd_client.parameters.tiles import entries_of, tiling_of
from memd_client.parameters.unnamed import unnamed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from memd_client.core.job import Job


@untraced
def gather(
    params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor], *, write: bool = False
) -> AbstractContextManager[None]:
    """Inside, offloaded parameters are `nn.Parameter`s over memd's own memory, all at once; modules
    can be used too. Those that `init` has built and that have no names yet stay in this process
    meanwhile. Parameters in tiles are copies in this process, and what is changed goes back when
    the context is left. Other parameters are not touched.

    Args:
        params_or_module: what to gather; the job's host memory must hold all of it.
        write: keeps what is changed inside, by whatever means, `param.data = value`, `param.grad =
            value` and `requires_grad_()` included, and makes it durable when the context is left.
            Keep no tensor that shares a parameter's bytes beyond it. Without `write` the
            parameters are only for reading: a change that torch counts is kept, and the next use
            or step refuses any other.

    Raises:
        CapacityError: they do not fit into the job's host memory together.
        MemdError: `write` inside a context that reads the same parameters; without `write`, the
            data or gradient of a parameter is assigned.
        NotResident: a parameter is given another shape, dtype or device.
    """
    return _Gathered(params_or_module, write=write)


class _Gathered(AbstractContextManager[None]):
    """Not a generator: an interrupt between `contextlib` and the caller's block would leave it
    waiting inside, with all that it holds."""

    def __init__(
        self, params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor], *, write: bool
    ) -> None:
        self._params_or_module = params_or_module
        self._write = write
        self._jobs: set[Job] = set()
        self._inside = ExitStack()

    @untraced
    def __enter__(self) -> None:
        write = self._write
        parameters = _parameters(self._params_or_module)
        entries = [entry for parameter in parameters if (entry := streamed(parameter)) is not None]
        in_tiles = [parameter for parameter in parameters if tiling_of(parameter) is not None]
        with ExitStack() as inside:
            inside.enter_context(fetched(parameters, mode=MODE_WRITE if write else MODE_READ))
            _bring_unnamed(parameters, inside)
            for parameter in in_tiles:
                inside.enter_context(gathered(parameter, write=write))
            for entry in entries if not write else ():
                inside.enter_context(entry.residency.keeping_value())
            self._jobs = {entry.job for each in parameters for entry in entries_of(each)}
            self._inside = inside.pop_all()

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inside.close()
        if self._write and error is None:
            for job in self._jobs:
                job.sync_if_needed()


def _bring_unnamed(parameters: list[torch.Tensor], inside: ExitStack) -> None:
    for parameter in parameters:
        record = unnamed(parameter)
        if record is not None:
            record.store.bring([parameter])
            # It does not leave while somebody else has its memory.
            inside.callback(_forget, parameter.detach())


def _forget(tensor: torch.Tensor) -> None:
    del tensor


def _parameters(
    params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> list[torch.Tensor]:
    if isinstance(params_or_module, nn.Module):
        return list(params_or_module.parameters())
    if isinstance(params_or_module, torch.Tensor):
        return [params_or_module]
    unique = {id(parameter): parameter for parameter in params_or_module}
    return list(unique.values())
