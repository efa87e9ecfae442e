"""Copy blocks of other kvstores into this one, on an order."""
