"""Make Halfmoon's decisions as plain functions of state, event and time."""
