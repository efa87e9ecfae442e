"""Exchange bytes with Mooncake's Transfer Engine over its TCP protocol and metadata records."""
