"""Share helpers between commands: the demo model, stop signals, printable text."""
