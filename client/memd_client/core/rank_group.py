"""The processes that train a job together, as torch.distributed has them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from memd_client.connection.launcher import refuse_others, warn_of_kept_store
from memd_client.core.ranks import Ranks
from memd_client.errors import InvalidArgument, MemdError, NotYet

if TYPE_CHECKING:
    from datetime import timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """This process and those that train a job with it. The same on all of them but for `rank`."""

    rank: int
    world_size: int
    members: tuple[int, ...]  # their ranks in the default process group, by rank of the job
    given: Any = None  # the process group; None: this process works alone

    @classmethod
    def find(
        cls, process_group: object = None, rank: int | None = None, world_size: int | None = None
    ) -> RankGroup:
        """Asks no other rank.

        Args:
            process_group: None: the default one, if there is one.
            rank, world_size: None: those that the process group says.

        Raises:
            InvalidArgument: there is no such rank, or no process group that has it.
        """
        has_begun = torch.distributed.is_available() and torch.distributed.is_initialized()
        if process_group is None and not has_begun:
            return cls._of_launcher(rank or 0, world_size)
        given = torch.distributed.group.WORLD if process_group is None else _plain(process_group)
        found = cls(
            rank=torch.distributed.get_rank(given),
            world_size=torch.distributed.get_world_size(given),
            members=tuple(torch.distributed.get_process_group_ranks(given)),
            given=given,
        )
        if process_group is None and world_size == 1:
            return cls._alone(rank or 0, torch.distributed.get_rank())
        if (rank, world_size) not in ((None, None), (found.rank, found.world_size)):
            found._refuse_other_place(rank, world_size)
        if found.world_size == 1:
            return cls._alone(0, found.members[0])
        return found

    @classmethod
    def _of_launcher(cls, rank: int, world_size: int | None) -> RankGroup:
        """A process without any process group."""
        if world_size is None:
            refuse_others()
        _refuse_no_rank(rank, 1 if world_size is None else world_size)
        if world_size is not None and world_size > 1:
            raise InvalidArgument(
                f"world_size is {world_size}, and no process group says who averages gradients; "
                "call torch.distributed.init_process_group() before connect()"
            )
        return cls._alone(rank, 0)

    @classmethod
    def _alone(cls, rank: int, member: int) -> RankGroup:
        _refuse_no_rank(rank, 1)
        return cls(rank=0, world_size=1, members=(member,))

    def _refuse_other_place(self, rank: int | None, world_size: int | None) -> None:
        """Refuses arguments that are not what the process group says."""
        rank = self.rank if rank is None else rank
        world_size = self.world_size if world_size is None else world_size
        _refuse_no_rank(rank, world_size)
        if (rank, world_size) != (self.rank, self.world_size):
            raise NotYet(
                "in this version all ranks of a process group train a job, the default one or "
                f"that of process_group=, or one process does: rank {rank} of {world_size}, and "
                f"the group says {self.rank} of {self.world_size}"
            )

    @property
    def is_part(self) -> bool:
        """There are other processes, which do not train this job."""
        return self.given is not None and self.world_size < torch.distributed.get_world_size()

    def meet(self) -> Ranks:
        """All of them call it. They talk in a group of gloo that nobody else knows."""
        if self.given is None:
            return Ranks(members=self.members)
        warn_of_kept_store()
        limit = self._limit()
        try:
            group = self._of_gloo(limit)
        except RuntimeError as error:
            raise MemdError(
                f"rank {self.rank} of {self.world_size}: another rank has ended or does not answer "
                f"while they connect; start all ranks again: {error}"
            ) from error
        return Ranks(
            self.rank,
            self.world_size,
            group,
            members=self.members,
            limit_s=limit.total_seconds(),
        )

    def _of_gloo(self, limit: timedelta) -> torch.distributed.ProcessGroupGloo:
        """Not by new_group(), which all processes of the default group have to call."""
        # The store may have the addresses of an earlier meeting: each has a name of its own.
        names = [uuid.uuid4().hex]
        c10d = torch.distributed.distributed_c10d
        torch.distributed.broadcast_object_list(names, group=self.given, group_src=0)
        store = c10d.PrefixStore(f"memd/{names[0]}", c10d._get_default_store())
        return torch.distributed.ProcessGroupGloo(store, self.rank, self.world_size, timeout=limit)

    def _limit(self) -> timedelta:
        """How long they wait for each other, as the process group was told."""
        devices = self.given._device_types
        device = torch.device("cpu") if torch.device("cpu") in devices else devices[0]
        found: timedelta = self.given._get_backend(device).options._timeout
        return found


def _refuse_no_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"rank is from 0 to world_size - 1: rank {rank}, world_size {world_size}"
        )


def _plain(process_group: object) -> torch.distributed.ProcessGroup:
    """The process group that was given, by itself or as a mesh of one dimension."""
    if isinstance(process_group, DeviceMesh):
        return _of_mesh(process_group)
    if process_group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(
            f"process_group has other ranks than {torch.distributed.get_rank()}, which is this "
            "one; each rank passes the group that it belongs to"
        )
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise InvalidArgument(
            "process_group is a group of torch.distributed, or a DeviceMesh of one dimension, not "
            f"a {type(process_group).__name__}"
        )
    return process_group


def _of_mesh(mesh: DeviceMesh) -> torch.distributed.ProcessGroup:
    if mesh.get_coordinate() is None:
        raise InvalidArgument(
            f"process_group is a mesh of ranks {mesh.mesh.tolist()}, and this is rank "
            f"{torch.distributed.get_rank()}; each rank passes a mesh that it belongs to"
        )
    if mesh.ndim > 1:
        names = mesh.mesh_dim_names
        if names is None:
            name, which = "dp", "give its dimensions names, with mesh_dim_names=, and pass that"
        else:
            name, which = ("dp" if "dp" in names else names[0]), "pass that"
        raise InvalidArgument(
            f"process_group is a mesh of shape {list(mesh.shape)}, and gradients are averaged over "
            f'one dimension; {which} of the data-parallel ranks, such as mesh["{name}"]. Ranks '
            "that differ in another dimension train jobs of other names"
        )
    group: torch.distributed.ProcessGroup = mesh.get_group()
    return group
