"""`halfmoon chat`: talk to a model from the terminal."""
