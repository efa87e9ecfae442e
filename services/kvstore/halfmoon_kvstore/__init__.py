"""Store KV blocks in memory and on disk."""
