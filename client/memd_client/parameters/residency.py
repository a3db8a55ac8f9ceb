"""The residency of one offloaded parameter: its bytes are away, in memd, or in place over a lease.

A parameter that is away has a hole: see `hole.py`. Shape, dtype and device stay right, since
autograd checks them when it accumulates.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from memd_client.core.leases import MODE_READ
from memd_client.errors import MemdError, NotResident
from memd_client.parameters.casts import Casts, is_autocasting
from memd_client.parameters.given_memory import (
    is_left,
    is_same_memory,
    memory_of_program,
    own_memory,
    refuse_other_form,
    refused_assignment,
    shows_all,
)
from memd_client.parameters.hole import make_hole, name_in_messages
from memd_client.parameters.lazy import LazyTensor
from memd_client.parameters.old_users import OldUsers
from memd_client.parameters.thread_uses import (
    add_use,
    is_in_place_here,
    must_wait,
    remove_use,
)
from memd_client.parameters.value_count import ValueCount
from memd_client.parameters.views import KeptViews, is_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol

    from torch import nn

    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job
    from memd_client.core.parameter_leases import ParameterLeases, WatchedLeases
    from memd_client.parameters.lazy import Source
    from memd_client.parameters.thread_uses import ThreadUses

    class OwnBytes(Source, Protocol):
        """The source of a parameter's lazy tensors: `away.ParameterBytes`."""

        def keep_copy(self, value: torch.Tensor) -> None:
            """The parameter has other memory from now on, and they show `value`."""
            ...


_data: Any = torch._C.TensorBase.data
_tracing_state: Any = torch._C._get_tracing_state
_mode_of: Any = torch._C._get_dispatch_mode
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY  # of make_fx and torch.export
# An attribute of the storage of every lease of a parameter. torch keeps a storage's Python object
# for as long as the storage lives, so a view that outlives its module call still has it. A table
# by identity would cost 1 µs more of each lease.
_SOURCE = "_memd_residency"


@dataclass(frozen=True)
class Classes:
    """The classes of a parameter while its bytes are away, and while they are in place."""

    away: type[nn.Parameter]
    in_place: type[nn.Parameter]


# Each use of a parameter by the thread that makes it.
Held = list[tuple["Residency", torch.Tensor, "ThreadUses"]]


def residency_of_storage(storage: torch.UntypedStorage) -> Residency | None:
    """The parameter whose bytes are in a storage, or None."""
    return getattr(storage, _SOURCE, None)


class Residency:
    """The bytes of one parameter, the unit of leasing. Away while nobody uses them, in place, over
    a lease, while somebody does. `fetch`, `fetch_resident`, `fetch_together` and `release` are the
    only functions that move them. Any thread may call; `fetch` and `fetch_together` wait for the
    daemon.

    All threads share the tensor, so only a thread that is counted as a user may compute with it:
    the last release swaps its memory. `ThreadUses` tells `InPlaceParameter` who is one.

    A step may take the parameter while other threads use it. They finish with the old value; who
    began after the step waits until they have left, and gets the new one.

    It also names the value, so that autograd notices a value that has changed since it was saved.
    """

    def __init__(
        self, parameter: nn.Parameter, *, shard: Shard, job: Job, classes: Classes
    ) -> None:
        self._shard = shard
        self._job = job
        self._classes = classes
        self._parameter = weakref.ref(parameter)
        self._hole = make_hole(shard.shape, shard.dtype, shard.device)
        name_in_messages(parameter, f"job {job.name!r}: the bytes of parameter {shard.label!r}")
        self._lock = RLock()
        self._user_count = 0
        self._old_users = OldUsers.under(self._lock)
        self._is_lent = False
        # While the bytes are in place to be written. The user may give the parameter other memory,
        # whose bytes are copied here in the end.
        self._written_lease: torch.Tensor | None = None
        self._has_new_data = False  # in place to be read, and given other bytes
        self._keeper_count = 0
        self._lease: weakref.ref[torch.UntypedStorage] | None = None  # in place, for reading
        self._views = KeptViews(shard, job.unordered_leases.of(shard))
        # torch's version of the parameter when its bytes were put away or in place: torch counts
        # the changes of it, and of tensors that share its bytes.
        self._version = parameter._version
        self._count = ValueCount()
        # `detach()` of the parameter while it is away is a view of this.
        self._shown: weakref.ref[LazyTensor] | None = None
        self._shown_bytes: weakref.ref[OwnBytes] | None = None
        self._casts: Casts | None = None  # since the first use under autocast
        with torch._C.DisableTorchFunctionSubclass():
            memory, offset = parameter.untyped_storage(), int(parameter.storage_offset())
            held = weakref.ref(memory)
            del memory
            self._put_away(parameter)
        # A parameter that goes to a device leaves its memory to others, as by `to()`.
        if not shard.is_on_device:
            self._views.keep_memory(held, offset)

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def parameter(self) -> nn.Parameter | None:
        """None if the module was dropped."""
        return self._parameter()

    @property
    def lock_order(self) -> tuple[int, int]:
        """Several locks of parameters are taken in this order, and a gradient's lock after that of
        its parameter."""
        return id(self._job), self._shard.shard_id

    @property
    def write_count(self) -> int:
        """Names the value by the number of its changes, those included that are in place and not
        in memd yet."""
        parameter = self._parameter()
        if parameter is None:
            return self._count.now
        with torch._C.DisableTorchFunctionSubclass():
            change_count = parameter._version - self._version
        return self._count.after(change_count)

    def count_of(self, view: torch.Tensor) -> int:
        """`write_count` of the value that `view` shows."""
        count = self.write_count  # before the next look: see `begin_update`
        if not self._old_users.outdated_at:
            return count
        with self._lock:
            parameter = self._parameter()
            if self._old_users.outdated_at and parameter is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    address = parameter.untyped_storage().data_ptr()
                if view.untyped_storage().data_ptr() == address:
                    return self._old_users.value_count
            return self.write_count

    def fetch(self, parameter: torch.Tensor, uses: ThreadUses, *, mode: int = MODE_READ) -> None:
        """Puts the bytes in place for a thread until `release`."""
        with self._lock:
            self._wait_while_outdated(uses)
            if not self._join_users(mode):
                leases = self._leases_for(parameter)
                self._put_in_place(parameter, leases.value(self._shard, mode), mode)
            self._user_count += 1
            add_use(uses, parameter)

    def fetch_resident(self, parameter: torch.Tensor, uses: ThreadUses) -> bool:
        """As `fetch` for reading, if that takes no request and no wait. Otherwise nothing
        changes."""
        with self._lock:
            if self._old_users.outdated_at and must_wait(uses, self._old_users.outdated_at):
                return False
            if not self._user_count:
                lease = self._leases_for(parameter).resident(self._shard)
                if lease is None:
                    return False
                self._put_in_place(parameter, lease, MODE_READ)
            else:
                self._join_users(MODE_READ)
            self._user_count += 1
            add_use(uses, parameter)
            return True

    @staticmethod
    def fetch_together(wanted: Held, *, mode: int) -> None:
        """As `fetch` of each, all or none. Requests of one job are sent together, before the first
        of them is waited for."""
        wanted = sorted(wanted, key=lambda each: each[0].lock_order)
        while (outdated := Residency._try_together(wanted, mode)) is not None:
            residency, _, uses = outdated
            # Without the locks of the others, which those that are waited for may need.
            with residency._lock:
                residency._wait_while_outdated(uses)

    @staticmethod
    def _try_together(wanted: Held, mode: int) -> tuple[Residency, torch.Tensor, ThreadUses] | None:
        """Fetches all, or returns one whose old users have to leave first."""
        held: Held = []
        absent: Held = []
        try:
            with ExitStack() as locks:
                for use in wanted:
                    residency, parameter, uses = use
                    with ExitStack() as lock:
                        lock.enter_context(residency._lock)
                        if must_wait(uses, residency._old_users.outdated_at):
                            break
                        if residency._join_users(mode):
                            residency._user_count += 1
                            add_use(uses, parameter)
                            held.append(use)
                        else:  # locked: no other thread fetches it meanwhile
                            absent.append(use)
                            locks.push(lock.pop_all())
                else:
                    found: list[torch.Tensor] = []
                    for _, group in groupby(absent, key=lambda each: id(each[0]._job)):
                        found += _lease_together(list(group), mode)
                    for use, lease in zip(absent, found, strict=True):
                        residency, parameter, uses = use
                        residency._put_in_place(parameter, lease, mode)
                        residency._user_count += 1
                        add_use(uses, parameter)
                        held.append(use)
                    return None
        except BaseException:
            release_all(held)
            raise
        release_all(held)
        return use

    def release(self, parameter: torch.Tensor, uses: ThreadUses) -> None:
        """Undoes one `fetch`. After the last one the bytes are away, and memd has what was changed
        in place.

        Raises:
            MemdError: the parameter was given another shape or dtype, by means that memd does not
                see, or was changed in a way that torch does not count. The value is as it was.
        """
        with self._lock:
            remove_use(uses, parameter)
            self._user_count -= 1
            if self._user_count > 0:
                return
            if self._leave_unchanged(parameter):
                return
            is_for_reading = self._written_lease is None
            with torch._C.DisableTorchFunctionSubclass():
                change_count = parameter._version - self._version
                try:
                    changed = self._take_changes(parameter, change_count)
                    is_changed = not is_for_reading or changed is not None
                    is_contradicted = (
                        is_changed
                        and (bool(self._views) or self._job.has_written_leases)
                        and self._views.contradict(parameter.detach())
                    )
                    shown = changed
                    if shown is None and not is_for_reading and self._views:
                        shown = parameter.detach().clone()
                    is_current = not is_changed and not self._old_users.outdated_at
                except BaseException:
                    self._hand_casts_back(None)
                    # A device's copy has what was written there.
                    self._job.unordered_leases.of(self._shard).note_change(self._shard)
                    self._put_away(parameter)
                    self._views.forget_ended()
                    raise
                if not is_current:
                    self._hand_casts_back(None)
                elif self._casts is not None:
                    self._casts.drop()
                if is_changed:
                    # At least one: changes through `.data` are not counted.
                    self._note_changes(max(change_count, 1))
                    self._job.mark_written()
                elif change_count:
                    self._note_changes(change_count)
                had_views = bool(self._views)
                given = memory_of_program(parameter, self._written_lease, self._lease)
                self._put_away(parameter)
                if given is not None:
                    self._views.keep_memory(*given)
            if changed is not None:
                try:
                    leases = self._job.leases_of(self._shard)
                    self._views.forget_ended()  # all of it is in `changed`
                    leases.write(self._shard, changed)
                except BaseException:
                    # As a write through a view that has ended: the next look takes it to memd.
                    self._views.forget_ended()
                    if self._job.ranks.is_first:  # otherwise it was refused, and is lost
                        self._views.keep_ended(changed, self._count.now)
                        self._version -= max(change_count, 1)
                    raise
            if shown is not None:
                self._views.show(shown, self._count.now)
            elif had_views or self._job.has_written_leases:
                self._take_written(0)
            if is_contradicted:
                raise _refused_write(
                    self._job,
                    self._shard,
                    "while the parameter changed too, and the change of the former is lost",
                )

    def _leave_unchanged(self, parameter: torch.Tensor) -> bool:
        """Ends the last use if it was for reading and torch has counted no change, as nearly every
        one: its cost counts."""
        if self._written_lease is not None or self._has_new_data:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if parameter._version != self._version:
                return False
            if self._casts is not None:
                if self._old_users.outdated_at:
                    self._casts.hand_back(None)
                else:
                    self._casts.drop()
            had_views = bool(self._views)
            self._put_away(parameter)
        if had_views or self._job.has_written_leases:
            self._take_written(0)
        return True

    def _take_changes(self, parameter: torch.Tensor, change_count: int) -> torch.Tensor | None:
        """When a lease for writing in host memory ends, memd takes what has changed. Under a lease
        for reading, or on a device, it does not, so a copy of changed bytes in host memory is
        returned, to be written: a device may have no room for one."""
        if self._written_lease is None:
            if change_count == 0 and not self._has_new_data:
                return None
            refuse_other_form(self._job, self._shard, parameter)
            if is_left(self._lease, parameter):
                raise refused_assignment(self._job, self._shard)
            if not self._has_new_data and _is_unwritten(
                self._job.unordered_leases.of(self._shard), self._lease, parameter
            ):
                return None
            if self._old_users.outdated_at:
                raise MemdError(
                    f"job {self._job.name!r}: parameter {self._shard.label!r} was changed by a "
                    "thread that has had its value since before a step, and the change is lost; "
                    "change parameters between steps, inside gather(write=True)"
                )
            return _copy_in_host_memory(parameter.detach())
        # No variable refers to the lease: an exception's traceback would keep it.
        is_leased = is_same_memory(parameter, self._written_lease)
        if not is_leased:
            refuse_other_form(self._job, self._shard, parameter)
        if self._shard.is_on_device:
            if not is_leased:  # what shows the lease keeps the value of before
                self._lease = None
            return _copy_in_host_memory(parameter.detach())
        if not is_leased:
            self._written_lease.copy_(parameter.detach())
        return None

    @property
    def is_gathered(self) -> bool:
        """A thread is inside `gather()`, which has the bytes in place for all of them."""
        return self._keeper_count > 0 or self._written_lease is not None

    def replace(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """For `parameter.data = value` by a thread that does not use it."""
        with self._lock:
            if self._user_count:
                self.replace_in_place(parameter, value)
                return
            if shows_all(value, self._shown):
                return
            refuse_other_form(self._job, self._shard, value)
            value = own_memory(value.detach(), self._shown)
            _leave_memory(self)
            self._hand_casts_back(self._read)
            self._views.forget_ended()  # they were written before
            self._job.leases_of(self._shard).write(self._shard, value)
            self._note_changes(1)
            self._job.mark_written()
            self._views.keep_memory(
                weakref.ref(value.untyped_storage()), int(value.storage_offset())
            )
            self._views.show(value, self._count.now)

    def replace_in_place(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """For `parameter.data = value` while the bytes are in place."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            value = value.detach()
            if is_same_memory(parameter, value):
                return
            self.refuse_if_kept("data")
            refuse_other_form(self._job, self._shard, value)
            value = own_memory(value, self._shown)
            _leave_memory(self)
            self._hand_casts_back(self._read)
            _data.__set__(parameter, value)
            self._has_new_data = True

    def expect_change(self) -> None:
        """The bytes that are in place will change, and torch may not count that."""
        with self._lock:
            self._hand_casts_back(self._read)
            self._has_new_data = self._written_lease is None

    @contextmanager
    def keeping_value(self) -> Iterator[None]:
        """Inside, `refuse_if_kept` refuses what a lease for reading does not allow."""
        with self._lock:
            self._keeper_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._keeper_count -= 1

    def refuse_if_kept(self, attribute: str) -> None:
        """Before an attribute of the parameter is assigned, which a module's own call and
        `gather(write=True)` may do."""
        if self._keeper_count and self._written_lease is None:
            raise MemdError(
                f"job {self._job.name!r}: parameter {self._shard.label!r} is gathered for reading, "
                f"so its .{attribute} can't be assigned; use gather(..., write=True)"
            )

    def fill(self, fill: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """`fill` writes all bytes of the value, for a load: a tensor of uint8. Until the function
        that is returned was called, which is when the load counts, what shares the parameter's
        memory in this process shows the value of before."""
        with self._lock:
            self._hand_casts_back(self._read)
            self._views.forget_ended()  # they were written before
        self._job.leases.fill(self._shard, fill)

        def show() -> None:
            with self._lock:
                self._note_changes(1)
                if self._views:
                    self._views.show(self._job.leases.value(self._shard), self._count.now)

        return show

    def reread(self) -> torch.Tensor:
        """The bytes for backward: those in place, or a lease that lives as long as autograd holds
        it.
        """
        with self._lock:
            parameter = self._parameter()
            if self._user_count and not self._old_users.outdated_at and parameter is not None:
                self._job.unordered_leases.of(self._shard).join(self._shard)
                with torch._C.DisableTorchFunctionSubclass():
                    return parameter.detach()
            if parameter is not None and not self._user_count:
                self._look(parameter)  # backward uses what was written to its memory since
            leases = self._job.leases_of(self._shard)
            leases.expect_backward(self._shard)
            lease = leases.value(self._shard, MODE_READ)
            setattr(lease.untyped_storage(), _SOURCE, self)
            return lease

    def _hand_casts_back(self, read: Callable[[], torch.Tensor] | None) -> None:
        """Before every change of the value: see `Cast.hand_back`."""
        if self._casts is not None:
            self._casts.hand_back(read)

    def _read(self) -> torch.Tensor:
        """The bytes that are in place, or a lease."""
        parameter = self._parameter()
        if self._user_count and not self._old_users.outdated_at and parameter is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return parameter.detach()
        return self._job.leases_of(self._shard).value(self._shard, MODE_READ)

    def refuse_if_in_use(self, what: str) -> None:
        """Before `what`, which changes the value in memd: this thread's uses would not see that,
        and changes in place would be lost."""
        with self._lock:
            is_changed = self._is_lent
            parameter = self._parameter()
            if parameter is not None and self._user_count:
                with torch._C.DisableTorchFunctionSubclass():
                    is_changed |= self._has_new_data or parameter._version != self._version
                is_changed |= self._written_lease is not None or is_in_place_here(parameter)
            if is_changed:
                raise MemdError(
                    f"job {self._job.name!r}: parameter {self._shard.label!r} is in use; leave "
                    f"gather() and module calls before {what}"
                )

    def lend(self, is_lent: bool, /) -> None:
        """Whether the value is in place elsewhere too, and may be written back from there: inside
        `gather()` of the whole of which this is a tile."""
        with self._lock:
            self._is_lent = is_lent

    def hold_still(self, held: ExitStack) -> None:
        """Until `held` is closed, no other thread moves the bytes. See `steps.Steps` for the order
        of locks."""
        held.enter_context(self._lock)

    def begin_update(self) -> None:
        """A step will change the value."""
        self._hand_casts_back(self._read)
        self._count.begin_update()
        self._old_users.begin_update(self._user_count, self._count.now)
        self._note_changes(1)
        self._count.end_update()

    def undo_update(self) -> None:
        """That step was not made: the value is the one before it."""
        # Without the lock: a thread that holds it may wait, in a lease, for this step to settle.
        self._old_users.undo_update()
        self._count.undo_update()
        # The daemon shows a new value before its step is committed, and a device may have it.
        self._job.unordered_leases.of(self._shard).note_change(self._shard)

    def _wait_while_outdated(self, uses: ThreadUses) -> None:
        """The caller has the lock, and no other parameter's."""
        if not must_wait(uses, self._old_users.outdated_at):
            return
        self._job.leases_of(self._shard)  # refuses what waiting does not help
        self._old_users.wait(uses, f"job {self._job.name!r}: parameter {self._shard.label!r}")

    def _join_users(self, mode: int) -> bool:
        """Whether the bytes are in place already, for `mode`."""
        if self._user_count and mode != MODE_READ and self._written_lease is None:
            raise MemdError(
                f"job {self._job.name!r}: parameter {self._shard.label!r} is in use for reading; "
                "leave that module call or gather() before gather(write=True)"
            )
        if self._user_count:
            self._job.unordered_leases.of(self._shard).join(self._shard)
            if self._casts is not None:
                self._casts.join()
        return self._user_count > 0

    def show(self, source: OwnBytes) -> LazyTensor:
        """The lazy tensor of all bytes, the same for as long as somebody holds a view of it."""
        with self._lock:
            shown = self._shown() if self._shown is not None else None
            if shown is None:
                shown = LazyTensor.over(source)
                self._shown, self._shown_bytes = weakref.ref(shown), weakref.ref(source)
            return shown

    def _note_changes(self, count: int) -> None:
        shown = self._shown() if self._shown is not None else None
        if shown is not None:
            shown.note_change()
        self._count.note_changes(count)
        self._job.unordered_leases.of(self._shard).note_change(self._shard)

    def _leases_for(self, parameter: torch.Tensor) -> ParameterLeases:
        """Leases of the value, before its bytes are put in place."""
        if _tracing_state() is not None or _mode_of(_PROXY) is not None:
            raise _refused_trace(self._job, self._shard)
        self._look(parameter)
        return self._job.leases_of(self._shard)

    def _look(self, parameter: torch.Tensor) -> None:
        """Takes what was written through views, which comes before a use."""
        with torch._C.DisableTorchFunctionSubclass():
            change_count = parameter._version - self._version
        if change_count or self._views or self._job.has_written_leases:
            self._take_written(change_count)

    @temporarily_clear_interpreter_stack()
    def _take_written(self, change_count: int) -> None:
        """Writes to memd what was written through views of the value, and torch has counted.

        Raises:
            MemdError: torch has not counted it, or views of different memory were written. The
                value is the one in memd, in every view.
        """
        leases = self._job.leases_of(self._shard)
        if change_count and not leases.read_privately:
            self._version += change_count
            self._views.forget_ended()
            raise _refused_write(
                self._job, self._shard, "while the parameter was away, and the change is lost"
            )
        # Until the end an error changes nothing: the next look finds the same.
        written = self._views.written()
        if written:
            leases.note_change(self._shard)  # a device's copy may be what was written
            value = leases.value(self._shard)
            written = [each for each in written if not is_same_bits(each.value, value)]
        if not written:
            self._version += change_count
            self._views.forget_ended()
            if change_count:
                self._note_changes(change_count)
            return
        # If two memories have changes of their own, neither is the value. All ranks have rank 0's.
        is_of_others = not self._job.ranks.is_first
        counted = not is_of_others and all(
            (change_count > 0 or each.is_shared)
            and each.write_count == self._count.now
            and is_same_bits(each.value, written[0].value)
            for each in written
        )
        value = (written[0].value if counted else value).clone()
        written.clear()
        if counted:
            self._hand_casts_back(self._read)
            self._views.forget_ended()  # their leases end: the write may need the room
            try:
                leases.write(self._shard, value)
            except BaseException:
                self._views.keep_ended(value, self._count.now)
                raise
        else:
            self._views.forget_ended()
        self._version += change_count
        if counted:
            # If torch does not count it, backward may use the new value.
            if change_count:
                self._note_changes(change_count)
            self._job.mark_written()
        self._views.show(value, self._count.now)
        if is_of_others:
            raise _refused_write(
                self._job,
                self._shard,
                f"on rank {self._job.ranks.rank}, where it is rank 0's and stays as it was",
            )
        if not counted:
            raise _refused_write(
                self._job,
                self._shard,
                "and not only in memory that shows the current value, so the value is as it was"
                if change_count
                else "and torch does not count that, so the value is as it was",
            )

    def take_writes(self, *, is_sealed: bool = False) -> None:
        """Before a step or sync: writes through views are part of it. Between `step()` and
        `commit()` nobody may use a value that is sealed, and they are refused."""
        # Nearly always, for each parameter at each step: nobody else shares the version counter.
        if not is_sealed and not self._views and not self._job.has_written_leases:
            return
        parameter = self._parameter()
        if parameter is None:
            return
        with self._lock:
            if not is_sealed:
                if not self._user_count:
                    self._look(parameter)
                return
            with torch._C.DisableTorchFunctionSubclass():
                change_count = parameter._version - self._version
            self._version += change_count
            is_written = change_count > 0
            if self._views or self._job.has_written_leases:
                is_written |= self._views.overlook()
        if is_written:
            raise _refused_write(
                self._job, self._shard, "after step() and before commit(), and the change is lost"
            )

    @property
    def is_viewed(self) -> bool:
        """Somebody holds a tensor that shares the bytes, and so must see an update."""
        return bool(self._views) and self._views.are_alive

    def show_update(self) -> None:
        """A step has changed the value, or the parameter was offloaded: views show it."""
        # Without the lock: a thread that holds it may wait, in a lease, for this step to settle.
        if self.is_viewed:
            value = self._job.leases_of(self._shard).value(self._shard)
            self._views.catch_up(value, self._count.now)

    def _put_in_place(self, parameter: torch.Tensor, lease: torch.Tensor, mode: int) -> None:
        storage = lease.untyped_storage()
        setattr(storage, _SOURCE, self)
        if mode != MODE_READ:
            self._hand_casts_back(lambda: lease)
        elif self._casts is not None:
            self._casts.refill(lease)
        with torch._C.DisableTorchFunctionSubclass():
            if mode == MODE_READ and is_autocasting(self._shard.device):
                self._casts = self._casts or Casts(self)
                self._casts.put_in_place(parameter, lease)
            else:
                _data.__set__(parameter, lease)
        parameter.__class__ = self._classes.in_place
        if mode == MODE_READ or self._shard.is_on_device:
            self._lease = weakref.ref(storage)
        if mode != MODE_READ:
            self._written_lease = lease

    def _put_away(self, parameter: torch.Tensor) -> None:
        """Inside DisableTorchFunctionSubclass."""
        self._written_lease = None
        self._has_new_data = False
        parameter.__class__ = self._classes.away
        self._version = parameter._version
        _data.__set__(parameter, self._hole)
        lease, self._lease = self._lease, None
        if lease is not None and lease() is not None:
            self._views.keep(
                lease,
                self._old_users.value_count if self._old_users.outdated_at else self._count.now,
            )
        self._old_users.leave()


def _lease_together(absent: Held, mode: int) -> list[torch.Tensor]:
    """Leases of parameters of one job."""
    leases = [residency._leases_for(parameter) for residency, parameter, _ in absent]
    found: list[torch.Tensor] = []
    for together, group in groupby(zip(leases, absent, strict=True), key=itemgetter(0)):
        found += together.values([residency._shard for _, (residency, _, _) in group], mode)
    return found


_UNSEEN = nullcontext()


def unseen() -> AbstractContextManager[None]:
    """A context in which operations are memd's own: dispatch modes of the program, such as that of
    selective checkpoints, do not see them, and inference mode leaves no mark on their results,
    which other threads may train with."""
    if torch._C._len_torch_dispatch_stack():
        return _unseen_by_modes()
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _UNSEEN


@contextmanager
def _unseen_by_modes() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        yield


def release_all(held: Held) -> None:
    """Releases all of them, last first, even if one raises."""
    try:
        with unseen():
            while held:
                residency, parameter, uses = held.pop()
                residency.release(parameter, uses)
    except BaseException:
        with ExitStack() as rest:
            for residency, parameter, uses in held:
                rest.callback(residency.release, parameter, uses)
        raise


def _leave_memory(residency: Residency) -> None:
    """The parameter gets other memory: what shows the present value keeps it.

    Raises:
        MemdError: something shows memd's own memory, where the new value will be.
    """
    if not residency._views.leave():
        raise refused_assignment(residency._job, residency._shard)
    found = residency._shown_bytes() if residency._shown_bytes is not None else None
    if found is not None:
        found.keep_copy(residency._read().clone())
    residency._shown = residency._shown_bytes = None


def _copy_in_host_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, device="cpu").copy_(value)


def _refused_trace(job: Job, shard: Shard) -> NotResident:
    return NotResident(
        f"job {job.name!r}: a graph that is traced keeps parameters, and the bytes of "
        f"{shard.label!r} are in memd; trace copy.deepcopy(module), or export with strict=False "
        "inside memd_client.gather(model)"
    )


def _is_unwritten(
    leases: WatchedLeases,
    lease: weakref.ref[torch.UntypedStorage] | None,
    parameter: torch.Tensor,
) -> bool:
    """Its memory is the lease's, and a change left every byte as it was: an embedding with
    `max_norm` is changed by each call, and few of its rows are too long."""
    return (
        leases.read_privately
        and lease is not None
        and lease() is parameter.untyped_storage()
        and not leases.is_written(parameter)
    )


def _refused_write(job: Job, shard: Shard, outcome: str) -> MemdError:
    return MemdError(
        f"job {job.name!r}: parameter {shard.label!r} was written through a tensor that shares its "
        f"bytes (.data, detach() or a view), {outcome}; change parameters inside gather(write=True)"
    )
