"""Copy blocks of other kvstores into this one, by a conductor's order."""
