"""The pure core: what happened goes in, what to do comes out. No clock, randomness, environment, I/O, threads, logging or async in here."""
