"""LSI, its ablation on data that comes with the library: without the invariance loss, without the importances, without both.

command:  python -m experiments.lsi.emoji_styles
cost:     36 cells of LeNet-5, some 11 CPU minutes
data:     emoji_styles, embedded; the styles noto and fluent_mono held out
paper:    none: it was not run on them
ours:     one client a style, 16 passes; invariance loss as the released code has it (mean over features, weight 10), as its
          sum breaks down here; 256 latents a style, made in 2,000 steps at 0.0005 (the paper: 6,400, 10,000 at 0.0001).
          Sizes and rate were chosen to be quick before anything was run, nothing was tuned; the last row, with a weight
          of 1, was added after the others
status:   run: results/lsi_emoji_styles.md
"""

from dataclasses import replace

from experiments.lsi.table1_pacs_officehome import SMALL
from experiments.lsi.table4_ablation import ROWS
from experiments.papers import Part, main
from fedjax_dg.config import RunConfig

SERVER = {
    "head_epochs": 5,
    "bank": 8,
    "inversion_steps": 2000,
    "latent_lr": 5e-4,
    "translator_steps": 1000,
    "hidden": 256,
}
CONFIG = RunConfig(
    algorithm="lsi",
    aggregator="importance",
    server_weighting="samples",
    client_lr=0.01,
    settings={**SERVER, "reduction": "mean", "lambda_di": 10.0},
    stations=3,
    clients_per_station=1,
    rounds=8,
    station_rounds=1,
    local_epochs=2,
    batch_size=32,
)
ALL = {"FedAvg, LeNet-5": {"algorithm": "fedavg", "aggregator": "mean"}, **ROWS}
ALL["both, lambda_di 1"] = ROWS["both"] | {"lambda_di": 1.0}
PAIRS = [(name, "neither") for name in list(ALL)[2:]] + [
    ("both", "FedAvg, LeNet-5"),
    ("both, lambda_di 1", "FedAvg, LeNet-5"),
]

PARTS = [Part(name, replace(CONFIG, held_out=name), ALL, against=PAIRS) for name in ("noto", "fluent_mono")]

if __name__ == "__main__":
    main(__doc__, PARTS, SMALL)
