"""Shapes of requests and answers that all APIs share; one package below for each API."""
