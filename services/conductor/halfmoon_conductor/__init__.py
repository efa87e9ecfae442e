"""Halfmoon's REST API and global scheduler."""
