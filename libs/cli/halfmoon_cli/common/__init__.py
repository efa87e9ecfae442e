"""Share between commands: the demo model's place, stop signals, printing of untrusted text."""
