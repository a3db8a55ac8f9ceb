"""Moving a module's parameters into memd."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memd_client.base.dtypes import FROZEN_DTYPES
from memd_client.base.dynamo import untraced
from memd_client.base.freed_memory import return_freed_memory
from memd_client.base.interrupts import defer_interrupts, safe_point
from memd_client.base.mapped_files import MappedFiles
from memd_client.base.overlaps import refuse_overlaps
from memd_client.base.sizes import UPDATE_BYTES, format_size
from memd_client.base.storage_uses import USES_OF_ONE, storage_uses
from memd_client.connection.shard import TIERS, Shard, bytes_name, bytes_spec, shard_spec
from memd_client.core.rank_group import RankGroup
from memd_client.core.tied_names import store_tied_names
from memd_client.device.model_on_device import ModelOnDevice, usable_device
from memd_client.errors import CapacityError, InvalidArgument, NotYet
from memd_client.parameters.away import AwayParameter
from memd_client.parameters.given_memory import is_row_major
from memd_client.parameters.in_place import InPlaceParameter
from memd_client.parameters.module_hooks import own_parameters, store_activations, stream
from memd_client.parameters.parameter import StreamedParameter
from memd_client.parameters.placement import Placement
from memd_client.parameters.residency import Classes
from memd_client.parameters.saved_activations import Activations
from memd_client.parameters.shared_unscaling import take_over_unscaling
from memd_client.parameters.tiles import Tiling, entries_of, tile_name
from memd_client.parameters.unnamed import unnamed
from memd_client.tile_linears import TiledLinear
from memd_client.transaction.buffers import ModuleBuffers, first_names
from memd_client.transaction.module_names import plain_name
from memd_client.updates.targets import owner_of
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from memd_client.base.mapped_files import FileBytes
    from memd_client.core.job import Job
    from memd_client.core.leases import Leases
    from memd_client.core.rank_gradients import RankGradients
    from memd_client.core.ranks import Ranks
    from memd_client.parameters.unnamed import UnnamedParameters
    from memd_client.session import Session

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_DTYPES = (torch.float32, torch.bfloat16)
# torch's type for it would make mypy take the rest for unreachable.
_is_made_of_others: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass
# Value, remainder and moments of an element.
_UPDATED_BYTES = 12
_CLASSES = Classes(away=AwayParameter, in_place=InPlaceParameter)


def offload(
    module: ModuleT,
    session: Session,
    *,
    tier: str = "nvme",
    device: torch.device | str | None = None,
    device_bytes: int | str | None = None,
    activations: str | None = None,
    strict: bool = True,
    process_group: ProcessGroup | DeviceMesh | None = None,
) -> ModuleT:
    """Moves the parameters of `module` into memd, in place, and returns the module. They are in
    memory only while they are used; the module's code does not change. If the job already has
    parameters of these names, the stored values win. Names are those of `named_parameters()`
    without the wrappers of torch.compile, DistributedDataParallel and activation checkpoints.
    After `init` it gives the model that was built there its names, where that has not done so.

    A parameter that is away answers for its shape and dtype, and any operation fetches it;
    `param.grad` is the gradient in memd. Buffers stay in this process; persistent ones are part of
    every commit.

    If several ranks train the job, all of them call it together with the same model. They lease
    the same memory, first values are rank 0's, and gradients are averaged as by
    DistributedDataParallel, which the module must not be wrapped in. Each forward begins
    with rank 0's buffers.

    Args:
        module: its parameters are contiguous, and on the CPU, all of them. Those that require a
            gradient are float32 or bfloat16; frozen ones of any other dtype stay frozen.
        session: it has shared memory.
        tier: where parameters and their optimizer state live while nobody uses them: "nvme", or
            "host": the job's host memory, and on disk only in a snapshot. A power cut, or a daemon
            that ends without a keeper of its memory, then takes the whole job back to its last
            snapshot, whatever its durability is. One job may have both. Buffers and tracked objects
            are of tier "nvme".
        device: where they are used, such as "cuda"; None is the CPU. They come there ahead of
            their use, and their gradients leave during backward; buffers go there for good. `grad`
            of a parameter, and the values in a `state_dict()`, are in host memory.
        device_bytes: as much memory of the device as parameters take there, in bytes or with a
            unit; None: at first the least, the largest module with those around it and 25 % more.
            It grows after rounds that have needed no more memory than those before, up to three
            quarters of what they have left, and to 95 % after 64 such rounds. After a
            torch.OutOfMemoryError it is the least until such rounds: call `zero_grad()` and run the
            batch again. Sums of gradients of several backwards have up to half of what rounds leave
            beside it.
        activations: where what autograd saves in a forward of `module` lives until backward needs
            it: "nvme", or "host": the job's host memory alone. Tensors of 64 KiB and more leave
            this process, or `device`; they count against the job's quotas, and no commit has
            them. It comes back ahead of its use. What a checkpoint inside the module saves is its
            inputs. None: it stays where it is. Values are those of the forward: a change in place
            that torch counts is an error in backward, as ever, and any other is not seen there; of
            memory of a device it may be seen in part.
        strict: if the job held parameters before this session, it must have those of `module`, and
            by the first step modules and optimizers of this session must have claimed all that it
            held. False: new parameters keep their own values, others stay as they are.
        process_group: as in `connect`, where it says who averages gradients: the same ranks.

    Raises:
        InvalidArgument, NotYet: a parameter or argument that can't be offloaded; or the job has
            values that were not stored completely, and other sessions, which may be storing them.
            Nothing has changed.
        CapacityError: the job's host memory can't hold the largest module with its gradients, or
            with that what lives in tier "host"; or the device has less free than `device_bytes`.
            Nothing has changed.
    """
    if activations is not None and activations not in TIERS:
        raise InvalidArgument(f'activations is "host", "nvme" or None: {activations!r}')
    place = usable_device(device) if device is not None else None
    if place is None and device_bytes is not None:
        raise InvalidArgument(
            f"device_bytes={device_bytes!r} needs a device, such as device='cuda'"
        )
    if tier not in TIERS:
        raise InvalidArgument(f'tier is "host" or "nvme": {tier!r}')
    defer_interrupts()
    job = session.transaction.job
    _ = job.leases  # needs shared memory
    ranks = job.ranks
    if process_group is not None:
        _refuse_other_group(RankGroup.find(process_group), ranks)
    if activations is not None:
        _refuse_activations(module, job, activations)
    if place is not None or ranks.are_several:
        take_over_unscaling()
    if not ranks.are_several:
        _offload(module, session, tier=tier, strict=strict, to=(place, device_bytes))
        if activations is not None:
            store_activations(module, Activations(job, activations, place))
        return module
    if place is not None:
        raise NotYet(
            f"job {job.name!r}: several ranks with devices come in a later version: device="
            f"{device!r}"
        )
    # Before the first rank stores its values, which are not what the job held.
    job.held_names.look()
    ranks.refuse_different(_described(module), "offload")
    ranks.in_order(lambda: _offload(module, session, tier=tier, strict=strict), "offload")
    # Weakly: a copy of the module is no copy of the session.
    module.register_forward_pre_hook(partial(_begin_forward, ref(job.rank_gradients)))
    return module


def _refuse_other_group(group: RankGroup, ranks: Ranks) -> None:
    if list(group.members) != ranks.members:
        raise InvalidArgument(
            f"process_group has ranks {list(group.members)}, and the session ranks "
            f"{ranks.members}, which average gradients; pass it to connect()"
        )


def _refuse_activations(module: nn.Module, job: Job, activations: str) -> None:
    asked = f"job {job.name!r}: activations={activations!r}"
    if job.ranks.are_several:
        raise NotYet(f"{asked} with several ranks comes in a later version; leave it out")
    if not job.store.can_keep_scratch:
        raise NotYet(
            f"{asked}: the daemon is older than this client, and would write them with each "
            "commit; start a new daemon"
        )
    if next(module.parameters(), None) is None:
        raise InvalidArgument(
            f"{asked}: memd sees what autograd saves while a module with parameters is called, and "
            f"this {type(module).__name__} has none; offload the model that it is a part of"
        )


@untraced
def _begin_forward(gradients: ref[RankGradients], module: nn.Module, args: object) -> None:
    """Before a forward of a module that several ranks train."""
    del args
    held = gradients()
    if held is not None and torch.is_grad_enabled():
        held.note_forward()
    wrapper: object = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is not None:
        raise InvalidArgument(
            f"{type(module).__name__} is offloaded by several ranks, whose gradients memd "
            "averages, and wrapped in DistributedDataParallel, which would average them again; "
            "call it without the wrapper"
        )


def _described(module: nn.Module) -> dict[str, str]:
    return {
        f"{name!r}": f"{list(tensor.shape)} {tensor.dtype}"
        + (" trained" if tensor.requires_grad else "")
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
    }


def _offload(
    module: ModuleT,
    session: Session,
    *,
    tier: str,
    strict: bool,
    to: tuple[torch.device | None, int | str | None] = (None, None),
) -> ModuleT:
    transaction = session.transaction
    job, built = transaction.job, session.unnamed
    leases = job.leases
    if built.has_named(module):
        if to[0] is not None:
            raise NotYet(
                f"job {job.name!r}: a model that init() has built on the CPU and that has its "
                "names already comes to a device in a later version; build it without init()"
            )
        return module
    _refuse_scripted(module)
    parameters = {
        plain_name(module, name): parameter
        for name, parameter in module.named_parameters()
        if type(parameter) is not nn.Parameter or parameter.numel()
    }
    for name, parameter in parameters.items():
        _refuse_parameter(name, parameter, built, to[0])
    refuse_overlaps((name, each) for name, each in parameters.items() if unnamed(each) is None)
    tile_heights = _tile_heights(module)
    for name, parameter in parameters.items():
        if id(parameter) in tile_heights:
            _refuse_tiled(name, parameter)
    pieces = [
        piece
        for name, parameter in parameters.items()
        for piece in _pieces(name, parameter, tile_heights.get(id(parameter)))
    ]
    _refuse_names_in_use({*parameters, *(piece.name for piece in pieces)}, job)
    _refuse_small_pool(module, tile_heights, job, pieces if tier == "host" else [])
    on_device = None
    if to[0] is not None:
        _refuse_on_device(module, tile_heights)
        on_device = ModelOnDevice.take(module, to[0], to[1], own_parameters, job)
    if not strict:
        job.held_names.relax()
    stored_names = [piece.stored_name for piece in pieces]
    job.held_names.refuse_unknown(stored_names)
    built.drop_left()

    specs = [piece.spec(TIERS[tier]) for piece in pieces]
    declared = job.declare(specs) if specs else []
    buffers = ModuleBuffers(module, job)
    shards = [piece.shard(shard) for piece, shard in zip(pieces, declared, strict=True)]
    first = job.held_names.first_values
    if job.ranks.is_first:
        first.learn_again()
    else:
        first.leave_to_first_rank()
    new_names = {
        name
        for name, answer in zip(stored_names, declared, strict=True)
        if not answer.written or first.is_unfinished(name)
    }
    new = [
        (piece, shard)
        for piece, name, shard in zip(pieces, stored_names, shards, strict=True)
        if name in new_names
    ]
    with first.storing([*new_names, *buffers.new_names]), closing(MappedFiles()) as files:
        files.expect(
            (source, shard.size_bytes)
            for piece, shard in new
            if (source := piece.in_file(built, files)) is not None
        )
        for piece, shard in new:
            safe_point()
            piece.store(leases, shard, built, files)
            job.mark_written()
        stored = buffers.exchange(job)
        if job.ranks.is_first:
            store_tied_names(job.store, first_names(module))
        job.sync_if_needed()
    if new_names or buffers.new_names:
        job.sync()  # on disk too they count from here on

    job.held_names.claim(stored_names)

    # Nothing below fails: the module is either as it was, or offloaded.
    for buffer, value in stored:
        with torch.no_grad():
            buffer.copy_(value)
    if on_device is not None:
        shards = [replace(shard, device=on_device.device) for shard in shards]
        on_device.use(shards, job)
    transaction.add(buffers)
    if job.ranks.are_several:
        buffers.share(module, job)
    built.forget(parameters.values())
    stored_parameters = [piece.parameter_of_its_own() for piece in pieces]
    entries = [
        StreamedParameter(
            parameter,
            shard=shard,
            update_count=answer.generation,
            transaction=transaction,
            classes=_CLASSES,
        )
        for parameter, answer, shard in zip(stored_parameters, declared, shards, strict=True)
    ]
    _join_tiles(parameters, pieces, stored_parameters)
    transaction.watch(Placement(module, job.name))
    stream(module)
    for entry in entries:
        entry.residency.show_update()
    return_freed_memory()
    built.delete_unused()
    return module


def _refuse_on_device(module: nn.Module, tile_heights: Mapping[int, Sequence[int]]) -> None:
    if tile_heights:
        raise NotYet(
            "layers in tiles on a device come in a later version; leave out tile_linears(), or "
            "offload without device="
        )
    for name, buffer in module.named_buffers():
        if buffer.device.type != "cpu":
            raise InvalidArgument(
                f"buffer {name!r} is on {buffer.device}, and offload(device=...) brings a model "
                "from the CPU to its device itself; call model.cpu() before"
            )


def _refuse_scripted(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise InvalidArgument(
                f"module {name or type(child).__name__!r} is a ScriptModule, which takes no hooks; "
                "offload the module that it was made of"
            )


def _refuse_parameter(
    name: str, parameter: nn.Parameter, built: UnnamedParameters, device: torch.device | None
) -> None:
    record = unnamed(parameter)
    if record is not None and record.store is not built:
        raise InvalidArgument(f"parameter {name!r} was built in init() of another session")
    for entry in entries_of(parameter):
        raise InvalidArgument(
            f"parameter {name!r} is offloaded already, as {entry.shard.label!r} of job "
            f"{entry.job.name!r}"
        )
    if _is_made_of_others(parameter):
        raise InvalidArgument(
            f"parameter {name!r} is a {type(parameter).__name__}, as fully_shard() makes them, and "
            "offload() takes whole ones: offload a module that has none of these, and give these "
            "to memd_client.AdamW as they are"
        )
    if type(parameter) is not nn.Parameter and record is None:
        raise InvalidArgument(
            f"parameter {name!r} is a {type(parameter).__name__}, not a plain nn.Parameter; "
            "initialise lazy modules first, and offload before other wrappers"
        )
    if parameter.layout is not torch.strided:
        raise InvalidArgument(
            f"parameter {name!r} is sparse; memd offloads dense parameters: {parameter.layout}"
        )
    if parameter.device.type == "meta":
        raise NotYet(
            f"parameter {name!r} has no bytes (device meta); inside init(session), give it some "
            "with model.to_empty(device='cpu') and initialise it, or load a state_dict with "
            "assign=True"
        )
    if parameter.device.type != "cpu":
        raise InvalidArgument(
            f"parameter {name!r} is on {parameter.device}, and offload() takes a model that is on "
            "the CPU; call model.cpu() before"
            + (f", and pass device={str(parameter.device)!r}" if device is None else "")
        )
    if parameter.dtype not in _DTYPES and parameter.dtype not in FROZEN_DTYPES:
        raise InvalidArgument(
            f"memd stores no parameters of {parameter.dtype}; view {name!r} as uint8, or keep it "
            "out of nn.Parameter"
        )
    if parameter.requires_grad and parameter.dtype not in _DTYPES:
        raise (NotYet if parameter.dtype == torch.float16 else InvalidArgument)(
            f"memd trains float32 and bfloat16: convert parameter {name!r}, or freeze it with "
            f"requires_grad_(False); it is {parameter.dtype}"
        )
    if (record is None or not record.is_away) and not is_row_major(parameter):
        raise InvalidArgument(
            f"parameter {name!r} is not contiguous, or channels_last; assign param.data = "
            f"param.data.clone(memory_format=torch.contiguous_format) first: shape "
            f"{list(parameter.shape)}, stride {list(parameter.stride())}"
        )
    if owner_of(parameter) is not None:
        raise InvalidArgument(
            f"parameter {name!r} belongs to an optimizer already; offload before you make it"
        )
    if parameter.grad is not None:
        raise InvalidArgument(
            f"parameter {name!r} has a gradient; call zero_grad() before offload()"
        )


def _refuse_names_in_use(names: set[str], job: Job) -> None:
    taken = job.shards.parameter_names & names
    if taken:
        raise InvalidArgument(
            f"job {job.name!r}: another module of this session has a parameter named "
            f"{min(taken)!r}; offload both at once inside an nn.ModuleDict, or use a job for each"
        )


def _refuse_small_pool(
    module: nn.Module,
    tile_heights: Mapping[int, Sequence[int]],
    job: Job,
    in_host_tier: Sequence[_Piece],
) -> None:
    # The daemon adds up what they need. Beside it the largest module needs room, which it does not
    # know: with an optimizer's state, or a step would find out.
    kept_bytes = sum(_state_bytes(piece.parameter, piece.shape) for piece in in_host_tier) + sum(
        _state_bytes(each.parameter, each.shard.shape)
        for each in job.shards.parameters
        if each.shard.tier == types_pb2.TIER_HOST and each.parameter is not None
    )

    def leased_bytes(parameter: nn.Parameter) -> int:
        tiles = tile_heights.get(id(parameter))
        size_bytes = parameter.numel() * parameter.element_size()
        return size_bytes if tiles is None else size_bytes // parameter.shape[0] * max(tiles)

    largest_bytes, largest = max(
        (
            (sum(map(leased_bytes, own_parameters(child))), name or type(child).__name__)
            for name, child in module.named_modules()
        ),
        default=(0, ""),
    )
    # Each rank may be at another module.
    module_count = job.ranks.world_size
    needed_bytes = (module_count + 1) * largest_bytes + UPDATE_BYTES + kept_bytes
    if largest_bytes and needed_bytes > job.host_bytes:
        raise CapacityError(
            f"job {job.name!r}: host_bytes is below what the largest module needs; connect with "
            f"more, or split module {largest!r}: {format_size(job.host_bytes)} < "
            f"{format_size(needed_bytes)} (parameters {format_size(largest_bytes)}"
            f"{f' for each of {module_count} ranks' if module_count > 1 else ''}, their "
            f"gradients, and {format_size(UPDATE_BYTES)} for the update"
            + (f", and {format_size(kept_bytes)} for tier host)" if kept_bytes else ")")
        )


def _state_bytes(parameter: torch.Tensor, shape: Sequence[int]) -> int:
    """Its value, and an optimizer's state if it may get one."""
    element_bytes = _UPDATED_BYTES if parameter.requires_grad else parameter.element_size()
    return math.prod(shape) * element_bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter, or a range of its rows: what the daemon has as one shard."""

    name: str
    parameter: nn.Parameter
    rows: tuple[int, int] | None = None
    whole_name: str = ""  # where it is a range of rows

    @property
    def stored_name(self) -> str:
        if self.parameter.dtype in _DTYPES:
            return self.name
        return bytes_name(self.name, self.parameter)

    @property
    def shape(self) -> Sequence[int]:
        whole = self.parameter.shape
        return whole if self.rows is None else (self.rows[1] - self.rows[0], *whole[1:])

    def spec(self, tier: types_pb2.Tier) -> types_pb2.ShardSpec:
        if self.parameter.dtype not in _DTYPES:
            return bytes_spec(self.name, self.parameter, tier=tier)
        return shard_spec(
            self.name,
            kind=types_pb2.SHARD_KIND_PARAMETER,
            dtype=self.parameter.dtype,
            shape=self.shape,
            tier=tier,
            value_only=True,  # until an optimizer takes it
        )

    def shard(self, declared: types_pb2.Shard) -> Shard:
        if self.parameter.dtype in _DTYPES:
            return Shard.of(declared, whole_name=self.whole_name)
        return Shard.of_bytes(declared, self.parameter, name=self.name)

    def store(
        self, leases: Leases, shard: Shard, built: UnnamedParameters, files: MappedFiles
    ) -> None:
        """Copies the value into `shard`."""
        value = self._value(built)
        source = self.in_file(built, files)
        if source is None:
            leases.write(shard, value)
            return

        def fill(into: torch.Tensor) -> None:
            if not source.read(into.numpy().data):
                into.copy_(value.view(-1).view(torch.uint8))

        leases.fill(shard, fill)

    def in_file(self, built: UnnamedParameters, files: MappedFiles) -> FileBytes | None:
        """The bytes of the value, if a mapped file has them."""
        record = unnamed(self.parameter)
        if record is not None and record.is_away:
            return None
        value = self._value(built)
        return files.find(value) if value.numel() else None

    def _value(self, built: UnnamedParameters) -> torch.Tensor:
        value = built.value(self.parameter)
        return value if self.rows is None else value[self.rows[0] : self.rows[1]]

    def parameter_of_its_own(self) -> nn.Parameter:
        """The parameter that gets a shard."""
        if self.rows is None:
            return self.parameter
        return nn.Parameter(
            torch.empty(0, dtype=self.parameter.dtype, device="cpu"), self.parameter.requires_grad
        )


def _pieces(name: str, parameter: nn.Parameter, tiles: Sequence[int] | None) -> list[_Piece]:
    if tiles is None:
        return [_Piece(name, parameter)]
    ends = itertools.accumulate(tiles)
    ranges = [(end - height, end) for height, end in zip(tiles, ends, strict=True)]
    return [_Piece(tile_name(name, *rows), parameter, rows, name) for rows in ranges]


def _tile_heights(module: nn.Module) -> dict[int, list[int]]:
    """By the id of each parameter that is stored in tiles."""
    return {
        id(weight): layer.tile_heights
        for layer in module.modules()
        if isinstance(layer, TiledLinear)
        and isinstance(weight := layer._parameters.get("weight"), nn.Parameter)
        and weight.dtype in _DTYPES
        and len(layer.tile_heights) > 1
    }


def _refuse_tiled(name: str, parameter: nn.Parameter) -> None:
    """Gradients will arrive at its tiles, and its memory ends."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise InvalidArgument(
            f"parameter {name!r} is tiled, so gradients arrive at its tiles, and its hooks would "
            "see none; remove them, or leave the layer out of tile_linears()"
        )
    record = unnamed(parameter)
    if (record is None or not record.is_away) and storage_uses(parameter) != USES_OF_ONE:
        raise InvalidArgument(
            f"somebody holds a tensor that shares the memory of parameter {name!r}, which is "
            "tiled and has its bytes in several places from now on; drop it, or clone it"
        )


def _join_tiles(
    parameters: Mapping[str, nn.Parameter],
    pieces: Sequence[_Piece],
    stored: Sequence[nn.Parameter],
) -> None:
    tiles: dict[int, list[nn.Parameter]] = {}
    for piece, parameter in zip(pieces, stored, strict=True):
        if piece.rows is not None:
            tiles.setdefault(id(piece.parameter), []).append(parameter)
    for name, parameter in parameters.items():
        if id(parameter) in tiles:
            Tiling(parameter, name, tiles[id(parameter)])
