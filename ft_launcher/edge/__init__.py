"""The edge: from words that a person typed to one frozen `Config`. Read once at the start, never again.

`table` lists the options, `sources` collects what flags, file and environment say, `torchrun` translates the spellings of another
launcher, `values` reads one text as one value, `resolve` makes the Config, `preflight` asks the machine whether it can hold. Nothing here
starts a process.
"""
