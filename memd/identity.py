"""The setting `identity`: what tells the daemon whose jobs a process uses.

`uid` is the kernel's word, and enough where users are people. In containers every root is uid 0:
there the pod is read from the process's control group (`cgroup`), or the process shows a token of
its service account (`token`).
"""

from __future__ import annotations

import os
import re
import select
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from memd.owner import OWN_TENANT, Owner, owner_by_uid
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from memd.peers import Peer
    from memd.tokens import TokenKeys

_PROC = Path("/proc")
# The kubelet's own names, with cgroupfs and with systemd, which writes a dash as an underscore. A
# static pod's uid is a hash without dashes.
_POD = re.compile(
    r"(?:pod|(?:kubelet-)?kubepods(?:-burstable|-besteffort)?-pod)"
    r"([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:\.slice)?"
)


class Identity(Protocol):
    @property
    def needs_token(self) -> bool: ...

    def of_peer(self, peer: Peer) -> Owner | None:
        """When it connects; None: its first call tells. Refused if nothing tells."""

    def of_token(self, peer: Peer, token: str) -> Owner:
        """Refused where the token is not good."""


class UidIdentity:
    needs_token = False

    def of_peer(self, peer: Peer) -> Owner:
        return owner_by_uid(peer.uid)

    def of_token(self, peer: Peer, token: str) -> Owner:
        del token
        return self.of_peer(peer)


class CgroupIdentity:
    """A pod's jobs belong to the pod: its containers may be started anew, and it may not."""

    needs_token = False

    def __init__(self, *, proc: Path = _PROC) -> None:
        self._proc = proc

    def of_peer(self, peer: Peer) -> Owner:
        if is_in_our_container(peer):
            return _administrator(peer)
        if peer.pid == 0:
            raise Refused(
                StatusCode.PERMISSION_DENIED,
                'identity is "cgroup", and this process has no number in the daemon\'s PID '
                "namespace, by which its control group would be found; give the daemon's pod "
                'hostPID, or set identity to "token"',
            )
        try:
            text = (self._proc / str(peer.pid) / "cgroup").read_text(encoding="utf-8")
        except OSError as error:
            raise Refused(
                StatusCode.PERMISSION_DENIED,
                f"the control group of process {peer.pid} cannot be read: {error.strerror}",
            ) from error
        # The number is that process's as long as it lives.
        if has_ended(peer.pidfd):
            raise Refused(StatusCode.UNAVAILABLE, f"process {peer.pid} has died")
        pod = pod_of(text)
        if pod is None:
            raise Refused(
                StatusCode.PERMISSION_DENIED,
                f'identity is "cgroup", and process {peer.pid} is in no pod of Kubernetes; train '
                'in a pod, or set identity to "uid" on a machine without it',
            )
        return Owner(uid=peer.uid, tenant=pod)

    def of_token(self, peer: Peer, token: str) -> Owner:
        del token
        return self.of_peer(peer)


class TokenIdentity:
    """A service account's jobs belong to it, in whichever pod it asks."""

    needs_token = True

    def __init__(self, keys: TokenKeys, *, administrators: tuple[str, ...] = ()) -> None:
        self._keys = keys
        self._administrators = administrators

    def of_peer(self, peer: Peer) -> Owner | None:
        return _administrator(peer) if is_in_our_container(peer) else None

    def of_token(self, peer: Peer, token: str) -> Owner:
        tenant = self._keys.tenant_of(token)
        return Owner(uid=peer.uid, tenant=tenant, administers_all=tenant in self._administrators)


def pod_of(cgroup: str) -> str | None:
    """The uid of the pod, of /proc/PID/cgroup as version 1 and 2 write it. The outermost counts: a
    container can make groups below its own, and name them as it likes."""
    pods = set()
    for line in cgroup.splitlines():
        parts = line.partition(":")[2].partition(":")[2].split("/")
        found = (match[1] for part in parts if (match := _POD.fullmatch(part)))
        if outermost := next(found, ""):
            pods.add(outermost.replace("_", "-"))
    # Hierarchies of version 1 that disagree prove nothing.
    return pods.pop() if len(pods) == 1 else None


def is_in_our_container(peer: Peer) -> bool:
    """Whether it is root or the daemon's user, and sees the daemon's own mounts. Its own pid
    namespace tells nothing where the daemon shares the machine's."""
    if peer.pid == 0 or peer.uid not in (0, os.geteuid()):
        return False
    try:
        theirs = (_PROC / str(peer.pid) / "ns/mnt").readlink()
        ours = (_PROC / "self/ns/mnt").readlink()
    except OSError:
        return False
    return theirs == ours and not has_ended(peer.pidfd)


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _administrator(peer: Peer) -> Owner:
    return Owner(uid=peer.uid, tenant=OWN_TENANT, administers_all=True)
