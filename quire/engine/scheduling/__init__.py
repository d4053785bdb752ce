"""Which sequence computes what in which block: sequences, block pool, prefix index, scheduler. No torch."""
