"""Keep what a conductor has seen lately, for operators. No decision depends on it."""
