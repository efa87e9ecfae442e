"""Show the roles of workers, and change them: `halfmoon roles`."""
