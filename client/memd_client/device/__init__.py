"""Parameters that are used on an accelerator: copies in, gradients out, and the waits between."""
