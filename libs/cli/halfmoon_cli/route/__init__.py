"""Run a conductor in front of plain inference servers: `halfmoon route`."""
