"""The thin shell: reads the clock, feeds the core, carries out its actions. All I/O of the launcher lives here; no decision does."""
