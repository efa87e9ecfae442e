"""An hour of traffic in seconds: the scheduling core over modelled engines and wires."""
