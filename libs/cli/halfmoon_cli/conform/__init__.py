"""Test a service against the protocol: `halfmoon conform`."""
