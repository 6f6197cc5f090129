"""Stable-FedADG, its three settings on data that comes with the library: against FedADG and FedAvg.

command:  python -m experiments.stable_fedadg.emoji_styles
cost:     27 cells of LeNet-5, some 4 CPU minutes
data:     emoji_styles, embedded; fluent_mono held out; the single source is noto
paper:    none: it was not run on them
ours:     three clients; one pass of warm-up and two others in each of 8 rounds (the paper: 3, 5, 30); the data set's own
          split. Sizes and rate were chosen to be quick before anything was run, nothing was tuned
status:   run: results/stable_fedadg_emoji_styles.md
"""

from dataclasses import replace

from experiments.papers import Part, main
from experiments.stable_fedadg.table2_pacs import ROWS, SMALL
from fedjax_dg.config import RunConfig

CONFIG = RunConfig(
    aggregator="mean",
    held_out="fluent_mono",
    stations=3,
    clients_per_station=1,
    rounds=8,
    station_rounds=1,
    local_epochs=3,
    batch_size=32,
    client_lr=0.02,
    settings={"warmup_epochs": 1, "adversary_lr": 0.014},
)
SETTINGS = {
    "single-domain": replace(CONFIG, setting="single-domain", sources="noto"),
    "leave-one-domain-out": replace(CONFIG, setting="leave-one-domain-out"),
    "mixed": replace(CONFIG, setting="mixed"),
}
OURS = {name: ROWS[name] for name in ("FedAvg", "FedADG", "Stable-FedADG")}
PAIRS = [("FedADG", "FedAvg"), ("Stable-FedADG", "FedAvg"), ("Stable-FedADG", "FedADG")]

PARTS = [Part(name, config, OURS, against=PAIRS) for name, config in SETTINGS.items()]

if __name__ == "__main__":
    main(__doc__, PARTS, SMALL)
