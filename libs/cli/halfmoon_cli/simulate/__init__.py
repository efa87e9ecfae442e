"""Run the simulator and measure its costs: `halfmoon simulate`, `paper` and `profile`."""
