"""What people look at. Reads ft_state and the journal only; never writes, never decides."""
