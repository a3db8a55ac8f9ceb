"""Offloaded parameters: gradients, values that come and go, and the hooks of modules."""
