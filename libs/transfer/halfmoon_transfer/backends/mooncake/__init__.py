"""A real Mooncake Transfer Engine as a peer, over its TCP protocol and metadata records."""
