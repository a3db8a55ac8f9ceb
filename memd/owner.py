"""Owners of jobs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memd.users import user_name

if TYPE_CHECKING:
    from memd_native import JobInfo

# The tenant of commands in the daemon's own container, which administer all jobs.
OWN_TENANT = "memd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A user, or where users tell nothing, a tenant: a pod, or a token's subject. A tenant's jobs
    have its name in front of their own."""

    uid: int
    tenant: str = ""
    administers_all: bool = False

    @property
    def key(self) -> int | str:
        """The same for all processes of one owner, which limits count together."""
        return self.tenant or self.uid

    @property
    def key_text(self) -> str:
        """As `key`, and to be read in an error. It asks nobody for a user's name."""
        return self.tenant or f"user {self.uid}"

    @property
    def shown(self) -> str:
        """It may ask the network for a user's name."""
        return self.tenant or f"user {user_name(self.uid)}"

    def stored_name(self, job: str) -> str:
        return f"{self.tenant}/{job}" if self.tenant else job

    def owns(self, job: JobInfo) -> bool:
        return self.owns_named(job.name, uid=job.uid)

    def owns_named(self, name: str, *, uid: int) -> bool:
        return tenant_of(name) == self.tenant if self.tenant else self.uid == uid


def tenant_of(stored_name: str) -> str:
    """No tenant's name has a slash."""
    tenant, slash, _ = stored_name.partition("/")
    return tenant if slash else ""


def owner_by_uid(uid: int) -> Owner:
    return Owner(uid=uid, administers_all=uid in (0, os.geteuid()))
