"""HFedATM, its ablation at three lambdas on data that comes with the library: FOT alone, RegMean alone, both.

command:  python -m experiments.hfedatm.emoji_styles
cost:     72 cells of LeNet-5, some 9 CPU minutes
data:     emoji_styles, embedded; the styles noto and fluent_mono held out
paper:    none: it was not run on them
ours:     5 x 5 clients; sizes and rate were chosen to be quick before anything was run, nothing was tuned
status:   run: results/hfedatm_emoji_styles.md
"""

from dataclasses import replace

from experiments.hfedatm.ablation import RULES
from experiments.papers import Part, main, pairs, product
from fedjax_dg.config import RunConfig

NAMES = {"Avg": "Avg", "w/o RegMean": "FOT only", "w/o FOT": "RegMean only", "Full": "HFedATM"}
MIXES = {f"lambda {mix}": {"domain_mix": mix} for mix in (0.0, 0.5, 1.0)}
ROWS = product(MIXES, {new: RULES[old] for old, new in NAMES.items()})
PAIRS = [pair for rule in list(NAMES.values())[1:] for pair in pairs(ROWS, rule, "Avg")]
CONFIG = RunConfig(stations=5, clients_per_station=5, rounds=10, station_rounds=2, batch_size=16, client_lr=0.05)
PARTS = [Part(name, replace(CONFIG, held_out=name), ROWS, against=PAIRS) for name in ("noto", "fluent_mono")]

if __name__ == "__main__":
    main(__doc__, PARTS)
