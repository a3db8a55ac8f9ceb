"""`memd top`: the daemon live."""
