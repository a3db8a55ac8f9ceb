"""Storage for `torch.distributed.checkpoint`, streamed: see `Writer` and `Reader`."""

from memd_client.checkpoint_reader import Reader
from memd_client.checkpoint_writer import Writer

__all__ = ["Reader", "Writer"]
