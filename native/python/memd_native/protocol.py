"""Versions of the protocol that one side speaks, and the one that two sides agree on."""

from __future__ import annotations

from dataclasses import dataclass

from memd_native._core import PROTOCOL_OLDEST, PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtocolVersions:
    oldest: int
    newest: int

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def agreed_with(self, others: ProtocolVersions) -> int | None:
        """The newest that both speak; None where there is none."""
        newest = min(self.newest, others.newest)
        return newest if newest in self and newest in others else None


SPOKEN = ProtocolVersions(oldest=PROTOCOL_OLDEST, newest=PROTOCOL_VERSION)


def versions_said(protocol_version: int, *, oldest: int, newest: int) -> ProtocolVersions:
    """By a message that may have no range: sides that know none speak one version."""
    if newest == 0:
        oldest = newest = protocol_version
    return ProtocolVersions(oldest=oldest, newest=newest)
