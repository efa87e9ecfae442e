"""Compute with halfmoon-engine-native, the optional extension in C++."""
