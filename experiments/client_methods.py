"""All client methods, each with plain averaging and with HFedATM at the server, on emoji styles: one table.

command:  python experiments/client_methods.py [--out client_methods] [--algorithms fedavg irm] [--smoke]
cost:     about an hour on two cores for all methods; can be killed and started again, finished cells are kept
data:     emoji_styles, embedded; LeNet-5, fluent_mono held out, three seeds
config:   experiments/client_methods.toml; every method with its own defaults, none of them tuned here
written:  OUT/<method>/ (run folders) and experiments/results/client_methods.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedjax_dg.algorithms import ALGORITHMS
from fedjax_dg.cli import main
from fedjax_dg.tables import interval

HERE = Path(__file__).parent
CONFIG = HERE / "client_methods.toml"
TABLE = HERE / "results" / "client_methods.md"
#: What differs from a method's defaults: the same five passes as the others make.
SETTINGS = {name: ["warmup_epochs=2"] for name in ("fedadg", "stable_fedadg")}
RULES = ("mean", "hfedatm")
#: Not gPerXAN, which needs batch norm, CCST, which needs files of weights, nor LSI, which trains at the server first.
METHODS = [name for name in ALGORITHMS if name not in ("gperxan", "ccst", "lsi")]


def run(name: str, out: Path, smoke: bool) -> dict[str, Any]:
    """Run one method's cells, or what is left of them; its ``result.json``."""
    folder = out / name
    command = ["run", "--config", str(CONFIG), "--algorithm", name, "--out", str(folder)]
    command += ["--resume"] if (folder / "config.json").exists() else []
    command += [word for setting in SETTINGS.get(name, ()) for word in ("--set", setting)]
    command += ["--rounds", "1", "--seeds", "1"] if smoke else []
    if main(command) == 2:
        raise SystemExit(f"{name}: not run")
    return json.loads((folder / "result.json").read_text())


def percent(values: list[float], seeds: int, sign: str = "") -> str:
    """Mean and 95 % t interval over seeds in percent, bold where the interval of a difference leaves out zero."""
    if not values:
        return "- (n=0)"
    found = interval(values)
    text = f"{100 * found['mean']:{sign}.1f}"
    if found["ci95"] is not None:
        text += f" ± {100 * found['ci95']:.1f}"
    if len(values) < seeds:
        text += f" (n={len(values)})"
    clear = sign and found["ci95"] is not None and abs(found["mean"]) > found["ci95"]
    return f"**{text}**" if clear else text


def table(results: dict[str, dict[str, Any]]) -> str:
    """Held-out accuracies, and differences paired by seed: to FedAvg under the same rule, and of HFedATM to averaging."""
    config = next(iter(results.values()))["config"]
    seeds = config["seeds"]
    found = {
        (name, rule): {c["seed"]: c["accuracy"] for c in result["cells"] if c["aggregator"] == rule}
        for name, result in results.items()
        for rule in RULES
    }

    def difference(one, other):
        common = sorted(set(found[one]) & set(found.get(other, {})))
        return percent([found[one][seed] - found[other][seed] for seed in common], seeds, "+")

    lines = ["method | mean | hfedatm | mean: method - FedAvg | hfedatm: method - FedAvg | hfedatm - mean", "--- |" * 6]
    for name in results:
        cells = [percent(list(found[name, rule].values()), seeds) for rule in RULES]
        gains = ["", ""] if name == "fedavg" else [difference((name, rule), ("fedavg", rule)) for rule in RULES]
        lines.append(" | ".join([name, *cells, *gains, difference((name, "hfedatm"), (name, "mean"))]))
    head = (
        f"Accuracy (%) on the held-out domain {config['held_out']} of {config['dataset']}, all its examples; round selected "
        f"by {config['selection']}; mean ± 95 % t interval over {seeds} seeds, differences paired by seed, bold where the "
        f"interval leaves out zero. {config['stations']} stations x {config['clients_per_station']} clients, setting "
        f"{config['setting']}, {config['rounds']} rounds of {config['local_epochs']} local passes, client_lr "
        f"{config['client_lr']}. One in twenty of such intervals leaves out zero by chance. n: seeds that did not break "
        "down.\n\n"
        "Made by `python experiments/client_methods.py` with `experiments/client_methods.toml`; methods at their defaults."
    )
    return head + "\n\n" + "\n".join(f"| {line.rstrip('|').strip()} |" for line in lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("client_methods"))
    parser.add_argument("--algorithms", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--smoke", action="store_true", help="one round and seed; the table goes to OUT")
    arguments = parser.parse_args()
    results = {name: run(name, arguments.out, arguments.smoke) for name in arguments.algorithms}
    target = arguments.out / "table.md" if arguments.smoke else TABLE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(table(results))
    print(target.read_text())
