"""One session's core, without torch.nn: leases, steps and the shards of a job."""
