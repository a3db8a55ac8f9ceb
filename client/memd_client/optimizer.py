"""Adam and AdamW that keep their states in memd."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakMethod

import torch

from memd_client.base.dynamo import untraced, without_compiler
from memd_client.base.interrupts import call_user, defer_interrupts
from memd_client.connection.shard import TIERS
from memd_client.core.backward import is_in_backward
from memd_client.core.ranks import Ranks
from memd_client.device.device_leases import refuse_early
from memd_client.errors import InvalidArgument, NotYet
from memd_client.parameters import changes_of_ranks
from memd_client.parameters.early import EarlyUpdates
from memd_client.parameters.module_hooks import end_interrupted_calls
from memd_client.parameters.tiles import entries_of, is_in_memd
from memd_client.transaction.adam_settings import adam_settings, plain_betas, refuse_group
from memd_client.transaction.module_names import without_wrappers
from memd_client.transaction.shown_states import begin_shown, listing, refuse_changed, show
from memd_client.transaction.transaction import call_settled
from memd_client.updates.clipping import clip_gradients
from memd_client.updates.delayed_updates import DelayedUpdates
from memd_client.updates.device_target import DeviceTarget
from memd_client.updates.loaded_states import refuse_state, replace_states, state_of
from memd_client.updates.pending_states import replace_pending, split_pending, with_pending
from memd_client.updates.resident_ranks import note_divided, refuse_apart
from memd_client.updates.resident_target import ResidentTarget
from memd_client.updates.streamed_target import StreamedTarget, TiledTarget
from memd_client.updates.target_table import TargetsById
from memd_client.updates.targets import (
    Part,
    Target,
    decide_maximum,
    is_offloaded_to_device,
    needs_name,
    own,
    refuse_orphans,
)
from memd_proto.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memd_client.connection.shard import Shard
    from memd_client.session import Session
    from memd_client.transaction.loaded_moments import LoadedMoments
    from memd_client.transaction.transaction import Transaction

_log = logging.getLogger("memd_client")
_SCALING = "step under a GradScaler"  # as in "all ranks step under a GradScaler alike"
_SCALER_STEP = torch.amp.GradScaler.step.__code__


class Adam(torch.optim.Optimizer):
    """`torch.optim.Adam` with its states in memd. The update is the same: in float32 it has the
    bits of torch's fused CPU kernel; bfloat16 parameters are updated in float32 and rounded.

    `step()` consumes the gradients of offloaded parameters. Others stay in this process, or on
    their device: `step()` reads `p.grad`, which stays until `zero_grad()`, and puts the new values
    in place. If the job already has parameters of these names, the stored values win. They have the
    names of `named_parameters()` if the optimizer was given these, and their positions otherwise.

    With several ranks, parameters that stay in the processes are those of a model in
    DistributedDataParallel, and memd has their state once, not once a rank (ZeRO-1). All ranks call
    `step()`, with the same gradients and values.

    Args:
        params: parameters, (name, parameter) pairs or groups, as for torch.
        lr, betas, eps, weight_decay, maximize: as for torch. They may be tensors where torch's may.
            Every step reads them from the group, so schedulers work, and so does a tensor that is
            changed in place.
        amsgrad: as for torch. The first update of a parameter decides whether it has a
            `max_exp_avg_sq`, which takes 4 bytes an element more.
        state_dtype: only the default in this version.
        step_in_backward: the update of each parameter that is offloaded, or stays on a device,
            begins during backward, once its gradient is complete; `step()` does the rest, and no
            value changes before it. The loop and the numbers stay the same. If the learning rate
            changes before `step()`, or a gradient through `p.grad`, the speculative update is made
            again. There is one backward a step: a second gradient of a parameter raises
            InvalidArgument in backward. So do `clip_grad_norm_()` and a GradScaler, which change
            every gradient after backward.
        delayed_update: of parameters that stay in this process or on a device. The daemon makes an
            update while the next forward and backward run, with the values from before it, and the
            next `step()` brings the new ones: ZeRO-Offload's one-step delay. A number: from this
            step on, as `resume()` counts them. The update has the settings of its own step. A
            commit has the values that the next forward uses, which takes their bytes twice more
            of the job's quotas, and `resume()` goes on with them. Snapshots have both too, and an
            export of one the values with every update; `save_safetensors` and `state_dict()` of the
            model have those that it shows. `has_pending_update` tells whether one is pending.
        session: needed if no parameter is offloaded.
        tier: where parameters that are not offloaded are kept, as in `offload`. Those that are
            offloaded, and their state, stay in their own tier.
        decoupled_weight_decay: as for torch; True makes this AdamW.
        foreach, capturable, differentiable, fused: as for torch, where they name the fused CPU
            kernel: `foreach=True`, `fused=False` and the other two are refused. The kernel ignores
            `capturable`, so it may be True beside `fused=True`.

    Raises:
        InvalidArgument: a parameter belongs to another optimizer or another session, or its dtype
            is not supported; or an argument asks for another of torch's implementations.
        NotYet: an argument above comes in a later version.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        *,
        session: Session | None = None,
        tier: str = "nvme",
        state_dtype: torch.dtype = torch.float32,
        step_in_backward: bool = False,
        delayed_update: bool | int = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if state_dtype != torch.float32:
            raise NotYet(f"states are float32 in this version: state_dtype={state_dtype}")
        if tier not in TIERS:
            raise InvalidArgument(f'tier is "host" or "nvme": {tier!r}')
        self._transaction = session.transaction if session is not None else None
        self._tier = TIERS[tier]
        self._has_warned = False
        self._targets = TargetsById()
        self._early = EarlyUpdates(_weakly(self._expected_groups)) if step_in_backward else None
        self._delayed = DelayedUpdates(delayed_update)
        defaults = {
            "lr": lr,
            "betas": plain_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. If a group is refused, because a parameter can't be updated, the optimizer
        stays as it was.
        """
        if self._targets:
            # Torch would begin anew with them, and in memd they would go on.
            refuse_changed(self)
        without_compiler(super().add_param_group, param_group)
        group = self.param_groups[-1]
        try:
            parameters: list[torch.Tensor] = group["params"]
            position = len(self.param_groups) - 1
            self._transaction = self._transaction or _transaction_of(parameters)
            if self._early is not None and self._ranks.are_several:
                raise NotYet("step_in_backward=True with several ranks comes in a later version")
            refuse_group(group, self._transaction.job)
            given = group.get("param_names")
            if given is None and any(map(needs_name, parameters)):
                self._transaction.job.held_names.refuse_unnamed(
                    "the optimizer's parameters that are not offloaded"
                )
            names = [
                without_wrappers(given[i]) if given else f"optimizer.{position}.{i}"
                for i in range(len(parameters))
            ]
            if self._early is not None and any(map(is_offloaded_to_device, parameters)):
                refuse_early()
            self._delayed.admit(
                parameters, names, self._transaction, is_early=self._early is not None
            )
            targets = own(
                parameters,
                names,
                optimizer=self,
                transaction=self._transaction,
                tier=self._tier,
                amsgrad=bool(group["amsgrad"]),
            )
            self._delayed.add(targets, self._transaction)
        except BaseException:
            self.param_groups.pop()
            raise
        if not self._targets:
            begin_shown(self)
        for parameter, target in zip(parameters, targets, strict=True):
            self._targets.add(parameter, target)
        inherited = max((target.update_count for target in targets), default=0)
        if inherited:
            _log.info(
                "job %r: %s goes on after update %d of its parameters, with their moments; call "
                "reset_state() to begin anew",
                self._transaction.job.name,
                type(self).__name__,
                inherited,
            )
        for part in self._targets.parts():
            if isinstance(part, StreamedTarget | DeviceTarget):
                part.update_early(self._early)
        self._show_states()
        self._look_again()
        self._transaction.register_optimizer(self)

    @property
    def is_part_of_commits(self) -> bool:
        """`track()` refuses what is."""
        return True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if torch's GradScaler asks. It then calls `step()` even if it has found infinite
        gradients: with `found_inf`, and with `grad_scale` unless `unscale_()` was called, as it
        calls torch's fused optimizers. Lightning asks too, and is told False: otherwise it refuses
        to clip gradients in every mixed precision, with a GradScaler or without.
        """
        self._refuse_in_backward("a GradScaler")
        caller = sys._getframe(1)
        if caller.f_code is not _SCALER_STEP:
            return False
        if self._ranks.are_several:
            # A rank that has made no gradient checks those of the others too.
            self._complete_gradients("GradScaler.step()")
            self._refuse_other_scale(caller.f_locals["self"].get_scale())
        return True

    def _refuse_other_scale(self, scale: float) -> None:
        gradients = self._only_transaction().job.rank_gradients
        if gradients.agreed(_SCALING) != scale:
            self._ranks.refuse_different({"the scale": scale}, _SCALING)
            gradients.note_agreed(_SCALING, scale)

    @property
    def delayed_update(self) -> bool | int:
        """As it was given. It may be set between steps: with False the next step is not delayed."""
        return self._delayed.begin

    @delayed_update.setter
    def delayed_update(self, begin: bool | int) -> None:
        self._delayed.begin = begin

    @property
    def has_pending_update(self) -> bool:
        """Parameters lack the update of the last step, which was delayed."""
        return self._delayed.are_pending

    @untraced
    def bring_pending_update(self) -> None:
        """Puts the values with the pending update in place, as the next `step()` would: to evaluate
        or save with them. The last commit has it pending still: a resumed loop begins without it.
        `session.after_commit()` can call it, so that a resumed run brings it after the same steps.

        Raises:
            InvalidArgument: between `step()` and `session.commit()`.
            MemdError: a value was written while its update was pending, and the change is lost.
        """
        if self._transaction is not None:
            job = self._transaction.job
            bring = partial(self._delayed.bring, job)
            call_settled(self._transaction, "bring_pending_update()", bring)

    def shard_name(self, parameter: torch.Tensor) -> str:
        """The name under which memd has a parameter of this optimizer."""
        return self._targets[id(parameter)].shard.name

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient, as one transaction. Returns the loss of
        `closure`, if there is one.

        Returns at once: the next use of a parameter waits for its update. Only if parameters stay
        in this process, it returns when their new values are in place. In a session that tracks
        objects nothing happens before `session.commit()`; until then, parameters whose gradients
        were taken cannot be used.

        In backward, as from `register_post_accumulate_grad_hook`, the calls of all optimizers are
        one step, which closes when backward ends: until then, parameters whose gradients were taken
        cannot be used. If backward raises, the step is not made, and they cannot be used before
        `zero_grad()`.

        Under a GradScaler that has found infinite gradients it updates nothing, and the step
        counts. The gradients stay until `zero_grad()`.

        Errors of the step are raised here or by the next call that waits for it.

        Raises:
            InvalidArgument: a second step before `session.commit()`, or of a parameter in one
                backward; a gradient that no optimizer takes; a backward inside another of which
                memd does not know the end; amsgrad was switched on after updates without it.
            CapacityError: amsgrad was switched on before the first update, and the job's quota does
                not hold the maximum.
            DaemonUnavailable, DeadlineExceeded: it is not known whether the step is committed.
                Every use of the session asks again, so a loop can go on where it was; `step()` with
                the same gradients takes them once.
            NotDurable: the step is committed in memory and could not be put on disk, as the job's
                durability requires. Raised once, until a step reaches the disk again; go on with
                the next one.
            MemdError: a view of a gradient is held, or the step was not committed. The job is at
                the step before, and values and gradients are as they were; if the message says that
                old values are not back in place, a use of them brings them, or raises. Or it says
                that the step is committed, but new values could not be put in place in this
                process: call again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = call_user(closure)
        try:
            with torch.no_grad():
                self._delayed.refuse_in_backward()
                if float(getattr(self, "found_inf", None) or 0.0):
                    transaction = self._only_transaction()
                    transaction.skip(partial(self._delayed.begin_step, transaction.job))
                else:
                    self._step(getattr(self, "grad_scale", None))
        except BaseException:
            # A GradScaler deletes it after a step, and multiplies by one that is left over.
            vars(self).pop("grad_scale", None)
            raise
        return loss

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Where `set_to_none` is False, zeros take the place of gradients, of those too
        that a step has consumed, and the next step updates with them. After a backward that has
        raised after `step()`, it drops the gradients that this `step()` has taken.

        Raises:
            MemdError: somebody holds a view of a gradient. Some gradients may be dropped.
        """
        self._take_pending()
        if self._transaction is not None:
            self._transaction.drop_broken(self._targets.parts())
        if set_to_none:
            self._drop_gradients()
        else:
            for part in self._targets.parts():
                part.set_gradient_to_zero()
        self._look_again()
        # torch reads the gradient of every parameter, which takes 5 µs if the parameter is away.
        if not all(
            is_in_memd(parameter) for group in self.param_groups for parameter in group["params"]
        ):
            without_compiler(super().zero_grad, set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns the norm before, a
        tensor of one element, on the device of the first parameter that has a gradient. The bits
        are those of `torch.nn.utils.clip_grad_norm_` over the same parameters; gradients are leased
        one at a time, and nothing waits for a device where torch does not.

        Raises:
            RuntimeError: `error_if_nonfinite` and the norm is not finite.
            InvalidArgument: the optimizer was made with `step_in_backward=True`; or ranks have
                other gradients or arguments.
            MemdError: another rank could not. If it has failed while they scaled gradients, those
                are void on all ranks, until each calls `zero_grad()`.
        """
        self._refuse_in_backward("clip_grad_norm_()")
        # As a decorator it would be torch that an interrupt ends, between two changes of the mode.
        with torch.no_grad():
            if self._transaction is None:  # no parameter has come yet
                return torch.tensor(0.0)
            self._complete_gradients("clip_grad_norm_()")
            return clip_gradients(
                [target for target in self._in_order() if target.has_gradient],
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
                job=self._transaction.job,
            )

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """In torch's format, loadable by `torch.optim.Adam` or `AdamW`. Each parameter that was
        updated has `step`, `exp_avg` and `exp_avg_sq`, with amsgrad `max_exp_avg_sq` too, and
        before the first step each one that requires a gradient. The moments are float32 and of this
        moment; their bytes are read when they are used, or before they change: see
        `moments.MomentTensor`. The format has no fp32 values of bfloat16 parameters: training that
        loads it goes on from the bfloat16 values. `save_optimizer_safetensors` and
        `checkpoint.Writer` save them.

        While an update is pending, states have other names, with `pending_` before them, and the
        values after the update: an optimizer with `delayed_update` goes on from them and
        `model.state_dict()` of the same moment. `step` is a sentence then, which torch's optimizers
        show when they refuse it.
        """
        with listing(self, self._states()):
            state: dict[str, Any] = without_compiler(super().state_dict)
        return state

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` of this class, `torch.optim.Adam` or `AdamW` returned, also one
        that torch's distributed checkpoint has flattened. Durable when it returns. Moments that
        come from `state_dict()` of this optimizer and were neither used nor outdated are not moved.

        Several ranks call it together, with the same state, which the first one stores.

        It is one transaction: after an error, or if anybody is killed, every parameter has the old
        moments or, from the moment at which all are on disk, the new ones. No step is counted. At
        most the moments of one parameter are copied into this process; those of a file that
        `torch.load(mmap=True)` has opened are read where they are used.

        Raises:
            InvalidArgument: the states have other shapes, or are another optimizer's, or of amsgrad
                where the daemon is too old for it; or the job has other sessions. Nothing has
                changed.
            NotYet: the daemon is older than this client. Nothing has changed.
            CapacityError: the job's disk quota does not hold the new moments beside the old ones,
                as it has to until all are there, or the maxima of amsgrad. Nothing has changed.
            MemdError: nothing has changed; or the message says that this session may have some old
                moments and some new ones. Then no step or commit is made in it, and the next one
                finds all old ones or all new ones.
        """
        before = self._optimizer_load_state_dict_pre_hooks
        after = self._optimizer_load_state_dict_post_hooks
        state_dict = state_dict.copy()
        for hook in before.values():
            changed = call_user(hook, self, state_dict)
            state_dict = state_dict if changed is None else changed
        # torch's loading, which gets the groups alone, would call them in the middle.
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        try:
            self._load(state_dict)
        finally:
            self._optimizer_load_state_dict_pre_hooks = before
            self._optimizer_load_state_dict_post_hooks = after
        for follow in after.values():
            call_user(follow, self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        job = self._only_transaction().job
        job.settle_for("new state of the optimizer")
        for group in state_dict["param_groups"]:
            refuse_group({**self.defaults, **group}, job)
        saved_order = list(
            chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        )
        targets = list(self._in_order())
        if len(saved_order) != len(targets):
            raise InvalidArgument(
                f"the state is of an optimizer with {len(saved_order)} parameters; this one has "
                f"{len(targets)}"
            )
        found = [state_of(state_dict["state"], index) for index in saved_order]
        states, pending = split_pending(targets, found, self._delayed)
        if not any(states) and any(target.update_count for target in targets):
            self._refuse_emptied(state_dict["state"], saved_order)
        for target, state in zip(targets, states, strict=True):
            refuse_state(target, state, job)
        groups = self.param_groups
        without_compiler(
            super().load_state_dict, {"state": {}, "param_groups": state_dict["param_groups"]}
        )
        try:
            self._load_states(states)
            replace_pending(pending, self._only_transaction())
        except BaseException:
            _replace_groups(self, groups)
            raise

    def _refuse_emptied(self, states: dict[Any, Any], saved_order: list[Any]) -> None:
        """Before all moments are forgotten."""
        parameters = (each for group in self.param_groups for each in group["params"])
        for parameter, index in zip(parameters, saved_order, strict=True):
            if parameter.requires_grad and index in states:
                raise InvalidArgument(
                    "the state lists parameters, and no moments of them, so that all would begin "
                    "anew; if that is meant, call reset_state()"
                )

    def note_states(self, moments: Sequence[LoadedMoments]) -> None:
        """A load has replaced moments of the job."""
        loaded = {each.shard.shard_id: each for each in moments}
        for target in self._in_order():
            found = loaded.get(target.shard.shard_id)
            if found is not None:
                target.note_state(found.update_count, keeps_maximum=found.has_maximum)
        self._look_again()
        self._begin_shown_states()

    def reset_state(self) -> None:
        """Sets the moments and the number of updates of every parameter to zero, as they are in a
        new optimizer of torch with the settings of the groups. Durable when it returns, and all or
        none as `load_state_dict()`; all ranks call it together. A new optimizer over a job's
        parameters goes on with what the job has of them.

        Raises:
            InvalidArgument: between `step()` and `session.commit()`; or the job has other sessions.
        """
        self._only_transaction().job.settle_for("new state of the optimizer")
        self._delayed.refuse_pending("reset_state()")
        self._load_states([None] * len(list(self._in_order())))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called with loaded groups, which older versions of torch wrote without some settings."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            "memd's optimizers can't be copied or pickled, since one optimizer updates each "
            "parameter; save state_dict(), and load it into an optimizer of the copied model"
        )

    def _take_pending(self) -> None:
        """A hook that was registered before memd's runs before it, and autograd has the gradient
        still."""
        if is_in_backward():
            for target in self._targets.values():
                target.take_pending()

    def _drop_gradients(self) -> None:
        dropped: list[Shard] = []
        self._targets.forget_assigned()
        job = self._transaction.job if self._transaction is not None else None
        if job is not None and job.rank_gradients.has_failed:
            changes_of_ranks.drop_all(job)
            return
        try:
            dropped.extend(part.shard for part in self._targets.parts() if part.drop_gradient())
        finally:
            if job is not None and (dropped or job.rank_gradients.is_drop_unanswered):
                job.drop_gradients(dropped)

    def _warn_of_taken_gradients(self, updated: list[Part]) -> None:
        """`updated` have gradients. With torch's optimizers, those of the last step would be there
        too where nobody has called `zero_grad()`."""
        if self._has_warned or not self._targets:
            return
        job = self._only_transaction().job
        if job.steps.may_be_repeated:
            return
        for target in updated or self._targets.parts():
            if isinstance(target, StreamedTarget) and target.would_repeat:
                self._has_warned = True
                _log.warning(
                    "job %r: step() consumes gradients, so this step %s the gradient of %r that "
                    "the last step took, and plain PyTorch does; call zero_grad() after each "
                    "step() to have the same numbers",
                    job.name,
                    "does not add" if updated else "does not repeat",
                    target.shard.name,
                )
                return

    def _step(self, scale: torch.Tensor | None) -> None:
        """`scale`: of a GradScaler. It divides gradients by it, as torch's fused kernel does."""
        self._take_pending()
        if not is_in_backward():  # there the step is refused
            self._complete_gradients("step()")
        groups: list[session_pb2.StepGroup] = []
        updated: list[Part] = []
        empty: list[Part] = []
        decisions: list[tuple[list[Part], bool]] = []
        for group in self.param_groups:
            targets = [
                part for p in group["params"] for part in self._parts_of(p) if part.has_gradient
            ]
            decisions.append((targets, bool(group["amsgrad"])))
            empty += [target for target in targets if not target.is_stored]
            stored = [target for target in targets if target.is_stored]
            if stored:
                refuse_group(group, self._only_transaction().job)
                shard_ids = [target.shard.shard_id for target in stored]
                groups.append(
                    session_pb2.StepGroup(settings=adam_settings(group), shard_ids=shard_ids)
                )
                updated += stored
        self._warn_of_taken_gradients(updated)
        if not updated:
            self._refuse_apart(updated, lambda: None)  # other ranks may have gradients
            return
        transaction = self._only_transaction()
        refuse_changed(self)
        defer_interrupts()
        end_interrupted_calls()
        self._look_again()

        def look() -> None:
            for targets, amsgrad in decisions:
                decide_maximum(targets, amsgrad=amsgrad, job=transaction.job)
            # Their leases would settle the step before, so not ahead of the transaction.
            for target in updated:
                if isinstance(target, StreamedTarget):
                    target.put_zeros()
                    target.follow_assigned()

        def prepare() -> None:
            self._delayed.begin_step(transaction.job)
            self._refuse_apart(updated, look)
            if scale is not None:
                self._unscale(updated, scale)

        transaction.step(
            groups,
            updated + empty,
            prepare=prepare,
            refuse_orphans=partial(refuse_orphans, transaction.job),
        )
        self._targets.forget_assigned()
        self._show_states(updated + empty)

    def _unscale(self, updated: Sequence[Part], scale: torch.Tensor) -> None:
        """Ranks share the work, but each has its own `p.grad` of what is not offloaded. The step is
        made when all have done theirs."""
        job = self._only_transaction().job
        # A scalar on the host divides gradients on any device, and waits for it.
        are_there = [
            isinstance(each, StreamedTarget) and each.shard.is_on_device for each in updated
        ]
        here = scale if all(are_there) else scale.cpu()
        try:
            for at, (target, is_there) in enumerate(zip(updated, are_there, strict=True)):
                is_own = at % job.ranks.world_size == job.ranks.rank
                if is_own or not isinstance(target, StreamedTarget):
                    target.unscale(scale if is_there else here)
        finally:
            note_divided([each for each in updated if isinstance(each, ResidentTarget)], job)

    def _expected_groups(self) -> list[session_pb2.StepGroup]:
        """The groups of a step in which every parameter that is updated early has a gradient, but
        for those of which that step decides whether there is a maximum."""
        return [
            session_pb2.StepGroup(
                settings=adam_settings(group),
                shard_ids=[
                    target.shard.shard_id
                    for p in group["params"]
                    for target in self._targets[id(p)].parts
                    if isinstance(target, StreamedTarget | DeviceTarget)
                    and not target.shard.is_bytes
                    and target.takes(amsgrad=bool(group["amsgrad"]))
                ],
            )
            for group in self.param_groups
        ]

    def _parts_of(self, parameter: torch.Tensor) -> Sequence[Part]:
        """The targets that a step updates."""
        target = self._targets[id(parameter)]
        if isinstance(target, TiledTarget):
            target.refuse_changed_assigned()
        return target.parts

    def _refuse_apart(self, updated: Sequence[Part], look: Callable[[], None]) -> None:
        """Before a step over `updated`, on all ranks: calls `look`, and compares what stays in
        their processes."""
        if any(isinstance(part, ResidentTarget) for part in self._targets.parts()):
            found = [target for target in updated if isinstance(target, ResidentTarget)]
            refuse_apart(found, self._only_transaction().job, look=look)
        else:
            look()

    @property
    def _ranks(self) -> Ranks:
        return Ranks() if self._transaction is None else self._transaction.job.ranks

    def _complete_gradients(self, what: str) -> None:
        """Before `what`: gradients of several ranks are averaged, and each rank knows of all."""
        if self._transaction is None:
            return
        job = self._transaction.job
        # Asked for again, the outcome of the last step comes first: other ranks have gone on.
        if not job.steps.would_repeat(
            [part for part in self._targets.parts() if part.has_gradient]
        ):
            job.rank_gradients.complete(what)

    def _look_again(self) -> None:
        if self._early is not None:
            self._early.look_again()

    def _refuse_in_backward(self, what: str) -> None:
        if self._early is not None:
            raise InvalidArgument(
                f"{what} changes gradients after backward, and step_in_backward=True has updated "
                "parameters with them by then; make the optimizer with step_in_backward=False"
            )

    def _in_order(self) -> Iterable[Target]:
        return (self._targets[id(p)] for group in self.param_groups for p in group["params"])

    def _only_transaction(self) -> Transaction:
        if self._transaction is None:
            raise InvalidArgument("the optimizer has no parameters yet; add a group first")
        return self._transaction

    def _states(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The state of each parameter that has one, in torch's format."""
        if self._transaction is None:
            return {}
        self._transaction.job.settle_for("state of the optimizer")
        moments = self._transaction.moments
        is_new = all(target.update_count == 0 for target in self._in_order())
        return {
            parameter: with_pending(
                target,
                target.state(moments, amsgrad=bool(group["amsgrad"])),
                self._transaction,
            )
            for group in self.param_groups
            for parameter in group["params"]
            if (target := self._targets[id(parameter)]).update_count
            or (is_new and parameter.requires_grad)
        }

    def _show_states(self, updated: Sequence[Part] = ()) -> None:
        """`self.state` lists what has been updated, by a step or before it was loaded. `updated`:
        the step in flight updates these."""
        named = {id(target) for target in updated}
        show(
            self,
            [
                parameter
                for group in self.param_groups
                for parameter in group["params"]
                if (target := self._targets[id(parameter)]).update_count
                or any(id(part) in named for part in target.parts)
            ],
        )

    def _load_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """One for each target; None: none yet."""
        settings = (bool(g["amsgrad"]) for g in self.param_groups for _ in g["params"])
        defer_interrupts()
        self._look_again()
        try:
            replace_states(
                list(zip(self._in_order(), states, settings, strict=True)),
                self._only_transaction(),
            )
        finally:
            self._begin_shown_states()

    def _begin_shown_states(self) -> None:
        """`self.state` lists what memd has now."""
        begin_shown(self)
        self._show_states()


class AdamW(Adam):
    """`torch.optim.AdamW` with its states in memd: see `Adam`; the weight decay is decoupled."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        *,
        session: Session | None = None,
        tier: str = "nvme",
        state_dtype: torch.dtype = torch.float32,
        step_in_backward: bool = False,
        delayed_update: bool | int = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize,
            session=session,
            tier=tier,
            state_dtype=state_dtype,
            step_in_backward=step_in_backward,
            delayed_update=delayed_update,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, its decay is decoupled whatever a loaded group says."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


def _weakly(
    method: Callable[[], list[session_pb2.StepGroup]],
) -> Callable[[], list[session_pb2.StepGroup]]:
    """`method` of an optimizer, for what the optimizer owns. An optimizer that nobody refers to
    must end at once, so that its parameters may belong to another."""
    weak = WeakMethod(method)

    def call() -> list[session_pb2.StepGroup]:
        held = weak()
        return held() if held is not None else []

    return call


def _transaction_of(parameters: list[torch.Tensor]) -> Transaction:
    for parameter in parameters:
        for entry in entries_of(parameter):
            return entry.transaction
    raise InvalidArgument(
        "none of the optimizer's first parameters is offloaded; pass session=, or offload the "
        "module first"
    )


def _replace_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """The attribute is torch's."""
    optimizer.param_groups = groups
