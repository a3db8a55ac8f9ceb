"""`memd doctor`: what of this machine stands in memd's way, each with what to do."""
