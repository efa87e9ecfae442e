"""Read which instructions this machine's processor has."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from halfmoon_protocol.kv_layout import DType

#: Names in /proc/cpuinfo of the instructions that compute in a precision, on x86 and on ARM.
INSTRUCTIONS: Mapping[DType, frozenset[str]] = MappingProxyType(
    {
        "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}),
        "float16": frozenset({"avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp"}),
    }
)
_CPUINFO = Path("/proc/cpuinfo")


def processor_features() -> frozenset[str] | None:
    """Return the names of the processor's features; None if the system does not list them."""
    try:
        return parse_cpuinfo(_CPUINFO.read_text(errors="replace"))
    except OSError:
        return None


def parse_cpuinfo(text: str) -> frozenset[str] | None:
    """Return the features that all processors of a /proc/cpuinfo have; None if it lists none."""
    found = [
        frozenset(values.split())
        for name, colon, values in (line.partition(":") for line in text.splitlines())
        if colon and name.strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*found) if found else None


def computes_natively(dtype: DType, features: frozenset[str]) -> bool:
    """Return whether a processor with these features has instructions for a precision."""
    return dtype == "float32" or not INSTRUCTIONS[dtype].isdisjoint(features)
