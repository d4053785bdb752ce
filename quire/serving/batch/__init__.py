"""Files and batches: storage, execution of lines, and recovery after a restart."""
