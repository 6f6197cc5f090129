"""A sweep of 16 settings x 3 seeds as one command, against a command for each setting.

command:  python experiments/benchmarks/sweep.py [--rounds 3] [--at-once 1 4 16] [--alone 16] [--out DIR]
cost:     about 12 minutes on 2 CPU cores

Work: HFedATM on emoji styles, the demo's federation (10 x 10 clients, 5 station rounds), 4 step sizes x 4 alphas x 3 seeds =
48 cells of --rounds rounds. Every command is a process of its own that starts with the compiled programs of the one before
it (``~/.cache``), as a user's would; with --cold it starts with none. --alone N runs N of the 16 settings alone, three seeds
each, and says what all would take. What is printed: programs compiled, seconds, the ratio to the sweep of the first
--at-once, and how far losses and accuracies of the same cell are apart.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedjax_dg.results import identity, read_metrics

RATES, ALPHAS = (0.02, 0.05, 0.1, 0.2), (0.25, 0.5, 0.75, 1.0)
TOML = """
[run]
aggregator = "hfedatm"
rounds = {rounds}
[sweep.grid]
client_lr = {rates}
alpha = {alphas}
"""


def command(words: list[str], cold: bool) -> tuple[float, int]:
    """Seconds of a ``fedjax-dg`` command, and how many programs it compiled."""
    environment = os.environ | ({"JAX_ENABLE_COMPILATION_CACHE": "false"} if cold else {})
    begun = time.perf_counter()
    told = subprocess.run(
        [sys.executable, "-m", "fedjax_dg.cli", *words], env=environment, capture_output=True, text=True
    )
    if told.returncode == 2:
        raise SystemExit(told.stderr)
    return time.perf_counter() - begun, told.stdout.count("Compiled the round")


def curves(folder: Path, setting: tuple = ()) -> dict:
    """Losses and accuracies by cell and round."""
    found = {}
    for record in read_metrics(folder):
        cell = identity(record)
        cell = cell._replace(setting=cell.setting or setting)
        found[cell, record["round"]] = (record["train_loss"], record["accuracy"])
    return found


def apart(one: dict, other: dict) -> str:
    """The largest differences over what both have."""
    both = one.keys() & other.keys()
    loss = max(abs(one[k][0] / other[k][0] - 1) for k in both)
    accuracy = max(abs(one[k][1] - other[k][1]) for k in both)
    return f"{len(both)} lines in common; losses {loss:.1e} apart (relative), accuracies {100 * accuracy:.2f} points"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--alone", type=int, default=16)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    file = out / "sweep.toml"
    file.write_text(TOML.format(rounds=options.rounds, rates=list(RATES), alphas=list(ALPHAS)))
    first, expected = 0.0, {}
    for at_once in options.at_once:
        folder = out / f"at_once_{at_once}"
        words = ["sweep", "--config", str(file), "--at-once", str(at_once), "--out", str(folder), "--overwrite"]
        seconds, programs = command(words, options.cold)
        found = curves(folder)
        first, expected = first or seconds, expected or found
        print(
            f"sweep, {at_once} at once: {programs} program, {seconds:.0f} s, {seconds / first:.2f}; {apart(found, expected)}"
        )
    found, total, programs = {}, 0.0, 0
    settings = list(itertools.product(RATES, ALPHAS))[: options.alone]
    for rate, alpha in settings:
        folder = out / f"alone_{rate}_{alpha}"
        words = ["run", "--aggregator", "hfedatm", "--rounds", str(options.rounds), "--client-lr", str(rate)]
        seconds, compiled = command(
            [*words, "--set", f"alpha={alpha}", "--out", str(folder), "--overwrite"], options.cold
        )
        total, programs = total + seconds, programs + compiled
        found |= curves(folder, (("client_lr", rate), ("alpha", alpha)))
    if settings:
        whole = total * len(RATES) * len(ALPHAS) / len(settings)
        print(
            f"{len(settings)} commands of 3 seeds: {programs} programs, {total:.0f} s; all 16 take {whole:.0f} s, "
            f"{whole / first:.2f}; {apart(found, expected)}"
        )


if __name__ == "__main__":
    main()
