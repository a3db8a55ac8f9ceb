"""Storage for `torch.distributed.checkpoint`, streamed: see `Writer` and `Reader`."""

from memd_client.checkpoints.checkpoint_reader import Reader
from memd_client.checkpoints.checkpoint_writer import Writer

__all__ = ["Reader", "Writer"]
