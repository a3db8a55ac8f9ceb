"""`memd bench`: this machine's figures, each beside a limit that is measured in the same run."""

from memd.bench.command import command

__all__ = ["command"]
