"""`memd demo`: trains a model larger than the memory it is given, and says what that took."""

from memd.demo.main import command

__all__ = ["command"]
