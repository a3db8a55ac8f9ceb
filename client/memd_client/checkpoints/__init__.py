"""Files of parameters and optimizer state, streamed both ways."""
