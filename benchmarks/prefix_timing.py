"""Measure whether latencies tell a tenant which prompts another tenant has cached.

    python -m benchmarks.prefix_timing

One tenant asks for a prompt twice: the second time it is cached. A stranger then asks for the same
prompt, and for one that nobody has asked for. If the stranger's two latencies come from the same
distribution, the share of pairs in which the cached prompt is quicker is near one half.
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.cluster import running
from benchmarks.fairness import MODEL, Client
from halfmoon_conductor.tenants import add_tenant

N_TOKENS = 2000


def main() -> None:
    """Run all rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="prompts to ask for")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.toml"
        owner, stranger = (add_tenant(tenants, name) for name in ("owner", "stranger"))
        extra = {"conductor": ["--tenants", str(tenants)]}
        with running(MODEL, n_prefill=2, n_decode=1, n_kvstore=1, extra=extra) as url:
            _measure(Client(url, owner), Client(url, stranger), options.rounds)


def _measure(owner: Client, stranger: Client, n_rounds: int) -> None:
    found: dict[str, list[float]] = {
        "its owner, cached": [],
        "a stranger, cached by the owner": [],
        "a stranger, cached by nobody": [],
    }
    for _ in range(n_rounds):
        prompt = owner.new_prompt(N_TOKENS)
        owner.ask_for(prompt, 4)
        asks = [
            ("its owner, cached", owner, prompt),
            ("a stranger, cached by the owner", stranger, prompt),
            ("a stranger, cached by nobody", stranger, owner.new_prompt(N_TOKENS)),
        ]
        random.shuffle(asks)
        for name, client, tokens in asks:
            found[name].append(client.ask_for(tokens, 4))
    print("| asked by | median TTFT |\n|---|---|")
    for name, ttfts_s in found.items():
        print(f"| {name} | {statistics.median(ttfts_s) * 1e3:.1f} ms |")
    _, cached, new = found.values()
    quicker = statistics.mean((a < b) + (a == b) / 2 for a in cached for b in new)
    # Of the rank sum of two samples from one distribution (Mann and Whitney, 1947).
    spread = ((2 * n_rounds + 1) / (12 * n_rounds * n_rounds)) ** 0.5
    print(f"\nThe cached prompt is quicker in {quicker:.2f} of the stranger's pairs.")
    print(f"One distribution gives 0.50 ± {2 * spread:.2f} (two standard deviations).")


if __name__ == "__main__":
    main()
