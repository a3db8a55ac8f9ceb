"""`memd snapshot export`: a snapshot becomes a folder of files, written by its caller's process."""
