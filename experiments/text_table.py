"""HFedATM on sentences: client methods x server rules x what of the network is trained, beside TF-IDF.

command:  python experiments/text_table.py --data-dir D --pretrained M [--regimes scratch frozen finetuned] [other options]
          M is a folder of MiniLM, or another BERT, with its weights and tokenizer; the README says how to get one
          other options are those of `fedjax-dg run`, such as --rounds 1 --seeds 1; TF-IDF needs scikit-learn
cost:     72 cells for each regime; on two cores half an hour each; can be killed
          and started again, finished cells are kept
data:     VADER's sentences, four domains (text_<regime>.toml say how many of them)
written:  OUT/<regime>/<method>/ (run folders) and OUT/table.md, as experiments/results/text_table_vader.md was
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from text_baseline import scores, thinned

from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig
from fedjax_dg.datasets.corpus import sound
from fedjax_dg.datasets.texts import READERS
from fedjax_dg.tables import markdown, table_title

HERE = Path(__file__).parent
METHODS = ("fedavg", "fedsr", "fediir")
REGIMES = {"scratch": "a small RoBERTa from scratch", "frozen": "frozen encoder", "finetuned": "all of it trained"}


def run(config: Path, method: str, folder: Path, options: list[str]) -> dict:
    """Run one method's cells, or what is left of them; its ``result.json``, empty after a dry run."""
    command = ["run", "--config", str(config), "--algorithm", method, "--out", str(folder), *options]
    if (folder / "config.json").exists():
        command.append("--resume")
    if main(command) == 2:
        raise SystemExit(f"{method}: not run")
    return {} if "--dry-run" in options else json.loads((folder / "result.json").read_text())


def balanced(cells: list[dict], config: RunConfig) -> str:
    """Mean balanced accuracies over seeds, and those of TF-IDF and logistic regression on the same texts, as Markdown."""
    corpus = thinned(sound(READERS[config.dataset](config.data_dir or "")), config.examples_per_domain)
    held_outs = [name for name in corpus.domain_names if any(cell["held_out"] == name for cell in cells)]
    lines = [
        f"Balanced accuracy (%), mean over {config.seeds} seeds, and of TF-IDF with logistic regression.",
        "",
        f"| | {' | '.join(held_outs)} |",
        f"| --- |{' --- |' * len(held_outs)}",
    ]
    for method, rule in dict.fromkeys((cell["algorithm"], cell["aggregator"]) for cell in cells):
        own = [cell for cell in cells if (cell["algorithm"], cell["aggregator"]) == (method, rule)]
        means = [np.mean([cell["balanced_accuracy"] for cell in own if cell["held_out"] == name]) for name in held_outs]
        lines.append(f"| {method} {rule} | " + " | ".join(f"{100 * mean:.1f}" for mean in means) + " |")
    baseline = scores(corpus)
    for place, kind in enumerate(("trained on the other domains", "trained within the domain")):
        numbers = " | ".join(f"{100 * baseline[name][place]:.1f}" for name in held_outs)
        lines.append(f"| TF-IDF, {kind} | {numbers} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--pretrained", required=True)
    parser.add_argument("--regimes", nargs="+", choices=tuple(REGIMES), default=tuple(REGIMES))
    parser.add_argument("--algorithms", nargs="+", default=METHODS)
    parser.add_argument("--out", type=Path, default=Path("text_table"))
    arguments, options = parser.parse_known_args()
    options += ["--data-dir", arguments.data_dir]
    texts = []
    for regime in arguments.regimes:
        own = options if regime == "scratch" else [*options, "--pretrained", arguments.pretrained]
        folders = {method: arguments.out / regime / method for method in arguments.algorithms}
        results = [run(HERE / f"text_{regime}.toml", method, folder, own) for method, folder in folders.items()]
        if all(results):
            config = RunConfig(**results[0]["config"])
            cells = [cell for result in results for cell in result["cells"]]
            texts.append(
                f"## {REGIMES[regime]}\n\n{markdown(cells, table_title(config), config.seeds)}\n{balanced(cells, config)}"
            )
    if texts:
        (arguments.out / "table.md").write_text("\n".join(texts))
        print("\n".join(texts))
