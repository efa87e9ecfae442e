"""`python -m halfmoon_simulator.costs.calibration [--write]`: the fit behind the A800 profiles.

The one calibration that all tables use. Its data are points read off Figure 14 of Mooncake's
FAST'25 paper (about 5 % accurate) for LLaMA3-70B on one node of 8 A800: prefill with nothing
and with 95 % cached, and 128 decoded tokens of a single request. LLaMA2-70B has the same
layers, heads and widths, so the same coefficients; arXiv 2407.00079 prints no absolute times.
"""

import sys
from pathlib import Path
from typing import Any

from halfmoon_protocol.messages import DecodeCost
from halfmoon_scheduling.prediction.cost_model import unscaled_prefill_s, unscaled_step_s
from halfmoon_simulator.costs.cost_file import CostFile, dump_costs
from halfmoon_simulator.costs.cost_fit import fit_prefill

#: (tokens, cached tokens, seconds)
PREFILL_POINTS = tuple(
    (n, int(n * share), seconds)
    for share, row in (
        (0.0, (1.0, 2.0, 4.5, 10.6, 27.5)),
        (0.95, (0.18, 0.27, 0.4, 0.85, 2.35)),
    )
    for n, seconds in zip((8192, 16384, 32768, 65536, 131072), row, strict=True)
)
#: (context tokens, seconds per token) of one request.
DECODE_POINTS = ((8192, 3.4 / 128), (131072, 3.9 / 128))
#: Multiplications and additions per token of a 70 B model over what 8 A800 do at the share of
#: their peak that the shortest prefill reaches (46 % of 8 × 312 TFLOPS): a further request's
#: cost in a step, which no figure shows.
REQUEST_STEP_S = 2 * 70e9 / (0.46 * 8 * 312e12)

_SOURCE = (
    "prefill: least squares of relative errors over ten points read off Fig. 14 of the FAST'25"
    " paper (8k to 128k tokens, 0 % and 95 % cached)",
    "decode d0 and d2: 128 tokens in 3.4 s at 8k and 3.9 s at 128k of context, same figure",
    "pass_s: d0, as a pass over one token; c0 less it is near the 0.10 s of storage latency that"
    " Fig. 7 of arXiv 2407.00079 shows for every prompt length",
    "decode d1: 2·70e9 operations at 46 % of 8 × 312 TFLOPS; no figure shows it",
    "device_kv_bytes: 8 × 80 GB × 0.9 less 140 GB of weights; host_kv_bytes: 1 TB, the paper's",
    "local_bytes_per_s: 8 × PCIe 4.0 x16 at 20 GB/s, an assumption",
)


def fit_decode() -> DecodeCost:
    """d0 and d2 through the two points, d1 as computed."""
    (c_low, s_low), (c_high, s_high) = DECODE_POINTS
    d2 = (s_high - s_low) / (c_high - c_low)
    return DecodeCost(d0_s=s_low - d2 * c_low - REQUEST_STEP_S, d1_s=REQUEST_STEP_S, d2_s=d2)


def a800_profiles() -> list[CostFile]:
    """Return the two A800 profiles."""
    prefill, decode = fit_prefill(PREFILL_POINTS), fit_decode()
    return [
        CostFile(
            name=name,
            source=(*_SOURCE, network),
            prefill=_rounded(prefill),
            pass_s=_rounded(decode).d0_s,
            decode=_rounded(decode),
            n_layers=80,
            n_kv_heads=8,
            head_dim=128,
            max_context=200_000,
            device_kv_bytes=int(8 * 80e9 * 0.9 - 140e9),
            host_kv_bytes=10**12,
            activation_bytes=8192 * 2,
            network_bytes_per_s=bandwidth,
            local_bytes_per_s=160e9,
        )
        for name, bandwidth, network in (
            (
                "llama3-70b-a800x8",
                87e9,
                "network_bytes_per_s: 87 GB/s measured on 4 × 200 Gbps (FAST'25, Fig. 12)",
            ),
            (
                "llama2-70b-a800x8",
                87e9,
                "network_bytes_per_s: up to 800 Gbps (arXiv 2407.00079, section 8) at the 87 GB/s"
                " that the FAST'25 paper measures on as much",
            ),
        )
    ]


def residuals() -> list[tuple[str, float, float]]:
    """Return the fitted points: (point, published seconds, our seconds)."""
    prefill, decode = fit_prefill(PREFILL_POINTS), fit_decode()
    rows = [
        (
            f"prefill {n // 1024}k, {round(100 * p / n)} % cached",
            seconds,
            unscaled_prefill_s(prefill, n, p),
        )
        for n, p, seconds in PREFILL_POINTS
    ]
    return rows + [
        (f"decode step, {context // 1024}k context", seconds, unscaled_step_s(decode, 1, context))
        for context, seconds in DECODE_POINTS
    ]


def _rounded(cost: Any) -> Any:
    """Four digits: more would claim what the readings do not hold."""
    return type(cost)(*(float(f"{getattr(cost, f):.4g}") for f in cost.__struct_fields__))


def main(arguments: list[str]) -> None:
    """Print the fit; with --write, write the profiles."""
    for point, published, ours in residuals():
        print(
            f"{point:28} {published:8.3f} s  {ours:8.3f} s  {100 * (ours / published - 1):+5.1f} %"
        )
    for costs in a800_profiles():
        print(costs.name, costs.prefill, costs.decode)
        if "--write" in arguments:
            path = Path(__file__).parents[1] / "profiles" / f"{costs.name}.json"
            path.write_text(dump_costs(costs))


if __name__ == "__main__":
    main(sys.argv[1:])
