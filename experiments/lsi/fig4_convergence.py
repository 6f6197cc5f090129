"""LSI, Fig. 4: accuracy on the unseen client by communication round, on DomainNet's paintings.

command:  python -m experiments.lsi.fig4_convergence --data-dir T --pretrained alexnet-owt-7be5be79.pth --out OUT
          and then the figure itself: fedjax-dg plot OUT/DomainNet; for other domains --set held_out=sketch; T is as in
          table2_domainnet.py
cost:     9 cells of AlexNet at 224 x 224: a GPU; --dry-run foresees it
data:     DomainNet's six domains, ten classes
paper:    the text of IV-B6 (painting held out); in the figure LSI is at its best within 5 rounds
ours:     as in table2_domainnet.py. gPerXAN is the paper's only: AlexNet has no batch norm. LSI's clients train once more
          before round 1 (head_epochs)
status:   not run by us on the real data, which may not be passed on
"""

from dataclasses import replace

from experiments.lsi.table1_pacs_officehome import ROWS, SMALL
from experiments.lsi.table2_domainnet import CONFIG
from experiments.papers import Part, main

ROUNDS = (1, 5, 15, 20)
NUMBERS = {"LSI": (37.57, 64.18, 68.09), "FedDG-GA": (17.95, 59.30, 64.19), "gPerXAN*": (13.69, 49.95, 58.19)}
PAPER = {row: {f"painting, round {r}": x for r, x in zip(ROUNDS, numbers)} for row, numbers in NUMBERS.items()}
OURS = {name: ROWS[name] for name in ("FedAvg", "FedDG-GA", "LSI")}
PAIRS = [("LSI", "FedAvg"), ("LSI", "FedDG-GA")]

PARTS = [Part("DomainNet", replace(CONFIG, held_out="painting"), OURS, PAPER, PAIRS, ROUNDS)]

if __name__ == "__main__":
    main(__doc__, PARTS, SMALL)
