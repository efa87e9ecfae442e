"""`halfmoon status`: the cluster as its conductor sees it, in a terminal."""
