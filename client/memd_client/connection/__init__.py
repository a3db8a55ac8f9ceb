"""The way to the daemon, and back to it when it was away."""
