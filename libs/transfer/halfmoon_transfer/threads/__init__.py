"""Run and stop threads; nothing here knows of transfers."""
