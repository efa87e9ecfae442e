"""Empty a kvstore before it leaves: order copies at other kvstores or write to its disk."""
