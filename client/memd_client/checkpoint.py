"""Storage for `torch.distributed.checkpoint`, streamed: see `Writer`."""

from memd_client.checkpoint_writer import Writer

__all__ = ["Writer"]
