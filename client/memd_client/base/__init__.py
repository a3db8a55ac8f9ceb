"""Words, sizes and threads: without torch's modules and without a daemon."""
