"""Building models in memd: a context in which parameters leave this process as they are created.

Hooks of torch say which modules and parameters are built. Two functions are replaced while the
context is open, since they make parameters of modules without these hooks: `nn.Module._apply`,
which `to_empty` calls, and `nn.Parameter.__deepcopy__`.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from memd_client.base.dynamo import untraced
from memd_client.base.interrupts import call_user, defer_interrupts
from memd_client.base.mapped_files import ReadingAhead
from memd_client.connection.shard import TIERS
from memd_client.core.ranks import failure_text
from memd_client.errors import InvalidArgument, MemdError
from memd_client.offload import offload
from memd_client.parameters.tiles import is_in_memd
from memd_client.parameters.unnamed import unnamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

    from memd_client.core.ranks import Ranks
    from memd_client.session import Session

# transformers loads a checkpoint with threads that read ahead as far as they come. This makes it
# read as it goes.
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
_LEAVING = "leave init()"
# Only one context is open in a process.
_opening = threading.Lock()
_open: list[_Init] = []


def init(
    session: Session, *, tier: str = "nvme", dtype: torch.dtype | None = None
) -> AbstractContextManager[None]:
    """Inside, the parameters of modules go to memd as they are created, so that a model may be
    larger than memory. The numbers are those of the same program without it.

        with memd_client.init(session):
            model = Gpt(config)
        optimizer = memd_client.AdamW(model.parameters())

    Inside, any use of a parameter brings it back: a model may initialise its parameters by whatever
    means, at once or later. This process has at most the parameters of the largest module and 16
    MiB of others, and what somebody holds a tensor of.

    When the context ends, the model that was built in it is offloaded, as by `offload(model,
    session)`; on an existing job the stored values win. If several models were built, or one on
    device "meta", nothing is offloaded: call `offload` for those that you train, which gives them
    their names. It may be called inside too, with arguments of its own. What has no name ends with
    the session. Modules are built by the thread that enters the context.

    Several ranks enter it together and build the same models. Each has what it builds for itself
    until the end, as with plain torch; then all have the values of rank 0.

    Args:
        session: it has shared memory. Until the end its job holds the parameters twice, and with
            several ranks once more for each: nvme_bytes needs room for that.
        tier: as in `offload`.
        dtype: floating-point parameters and buffers get it at the end, as `module.to(dtype)` would
            convert them.

    Raises:
        InvalidArgument: another context is open; an argument is not possible.
        CapacityError: the job can't hold the parameters.
        MemdError: at the end, as `offload`; or another rank has left by an exception. The models
            are as they were built, and `offload` may be called again.
    """
    if tier not in TIERS:
        raise InvalidArgument(f'tier is "host" or "nvme": {tier!r}')
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidArgument(f"dtype is one of floating-point numbers: {dtype}")
    return _Init(session, tier=tier, dtype=dtype)


class _Init(AbstractContextManager[None]):
    """One context. Not a generator, as `gather._Gathered` is none."""

    def __init__(self, session: Session, *, tier: str, dtype: torch.dtype | None) -> None:
        self._session = session
        self._tier = tier
        self._dtype = dtype
        self._store = session.unnamed
        self._thread_id = 0
        self._built: dict[int, weakref.ref[nn.Module]] = {}
        self._hooks: list[RemovableHandle] = []
        self._restore: list[Callable[[], object]] = []
        self._reading_ahead = ReadingAhead()

    @untraced
    def __enter__(self) -> None:
        defer_interrupts()
        _ = self._session.leases  # needs shared memory
        with _opening:
            if _open:
                raise InvalidArgument(
                    f"job {self._session.job!r}: init() is open already in this process, for job "
                    f"{_open[0]._session.job!r}; leave it first, or build all of it in one"
                )
            _open.append(self)
        try:
            # Before any rank has built something, which would seem to be held, or left by somebody.
            self._session.transaction.job.held_names.look()
            self._ranks.by_one(0, self._store.drop_left, "enter init()")
            self._store.delete_unused()
        except BaseException:
            _open.remove(self)
            raise
        self._thread_id = threading.get_ident()
        self._watch()

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._unwatch()
        _open.remove(self)
        self._reading_ahead.resume()
        if error is not None:
            if isinstance(error, Exception):  # others do not hold up an interrupt
                with suppress(MemdError):
                    self._ranks.exchange(failure_text(error), _LEAVING)
            if self._store.living():
                error.add_note(
                    f"job {self._session.job!r}: init() was left by this exception, and the job is "
                    "as it was; what was built so far has no names, and ends with its modules"
                )
            return
        self._refuse_broken(self._ranks.exchange("", _LEAVING))
        self._convert()
        roots = self._roots()
        if len(roots) > 1:
            gc.collect()  # some may be waiting for that
            roots = self._roots()
        self._ranks.refuse_different({"the number of models": len(roots)}, _LEAVING)
        if len(roots) == 1:
            (root,) = roots
            offload(root, self._session, tier=self._tier)
            self._store.note_named(root)
        else:
            self._store.make_room()

    @property
    def _ranks(self) -> Ranks:
        return self._session.transaction.job.ranks

    def _refuse_broken(self, failures: list[str]) -> None:
        for rank, failure in enumerate(failures):
            if failure:
                raise MemdError(
                    f"job {self._session.job!r}: rank {rank} of {len(failures)} has left init() by "
                    f"an exception, and nothing is offloaded: {failure}"
                )

    def _watch(self) -> None:
        self._hooks = [
            torch_module.register_module_parameter_registration_hook(self._note_parameter),
            torch_module.register_module_module_registration_hook(self._note_child),
        ]
        self._replace(nn.Module, "_apply", self._applying)
        self._replace(nn.Parameter, "__deepcopy__", self._copying)
        if _ONE_BY_ONE not in os.environ:
            os.environ[_ONE_BY_ONE] = "1"
            self._restore.append(lambda: os.environ.pop(_ONE_BY_ONE, None))

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for restore in self._restore:
            restore()
        self._hooks, self._restore = [], []

    def _replace(self, owner: type, name: str, around: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        replaced = around(original)
        setattr(owner, name, replaced)

        def restore() -> None:
            # Somebody else may have replaced it since, and calls ours.
            if getattr(owner, name) is replaced:
                setattr(owner, name, original)

        self._restore.append(restore)

    def _applying(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            before = list(module._parameters.values())
            result: nn.Module = call_user(original, module, *args, **kwargs)
            known = set(map(id, before))
            new = [each for each in module._parameters.values() if id(each) not in known]
            self._take(module if new else None, new, using=())
            return result

        return _apply

    def _copying(self, original: Callable[..., nn.Parameter]) -> Callable[..., nn.Parameter]:
        def __deepcopy__(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            copy = original(parameter, memo)
            self._take(None, [copy], using=[copy])
            return copy

        return __deepcopy__

    @untraced
    def _note_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        del name
        # The constructor goes on with these.
        self._take(module, [parameter], using=[*module._parameters.values(), parameter])

    @untraced
    def _note_child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        del name
        if child is not None:
            # It may be a copy, which torch makes without hooks.
            own = list(module._parameters.values())
            self._take(child, child.parameters(), using=own)
            self._take(module, own, using=own)

    def _take(
        self,
        module: nn.Module | None,
        parameters: Iterable[nn.Parameter | None],
        *,
        using: Iterable[nn.Parameter | None],
    ) -> None:
        """`module` has these parameters; those of `using` may not leave yet."""
        if threading.get_ident() != self._thread_id or not _open or _open[0] is not self:
            return
        if module is not None:
            self._built[id(module)] = weakref.ref(module)
        for parameter in parameters:
            if parameter is not None and _can_be_built(parameter):
                self._store.add(parameter)
                if not parameter.untyped_storage().resizable():
                    self._reading_ahead.suspend(parameter)
        self._store.make_room(using)

    def _living_modules(self) -> list[nn.Module]:
        found = [weak() for weak in self._built.values()]
        return [module for module in found if module is not None]

    def _roots(self) -> list[nn.Module]:
        """The modules with parameters to offload that no other module has."""
        modules = self._living_modules()
        children = {
            id(child) for module in modules for child in module.modules() if child is not module
        }
        return [
            module
            for module in modules
            if id(module) not in children
            if not all(parameter.is_meta for parameter in module.parameters())
            if not any(map(is_in_memd, module.parameters()))
        ]

    def _convert(self) -> None:
        dtype = self._dtype
        if dtype is None:
            return
        parameters = {id(each): each for each in self._store.living()}
        modules = [each for module in self._living_modules() for each in module.modules()]
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None and not is_lazy(parameter):
                    parameters[id(parameter)] = parameter
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))
        for each in parameters.values():
            if each.is_floating_point() and not is_in_memd(each):
                self._store.convert(each, dtype)


def _can_be_built(parameter: nn.Parameter) -> bool:
    """Whether it is an ordinary one that is not known yet, and has bytes."""
    return (
        type(parameter) is nn.Parameter
        and unnamed(parameter) is None
        and not is_in_memd(parameter)
        and parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and parameter.numel() > 0
    )
