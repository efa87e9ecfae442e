"""Run Halfmoon's decode worker."""
