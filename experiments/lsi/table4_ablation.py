"""LSI, Table IV: without the invariance loss, without the importances, without both.

command:  python -m experiments.lsi.table4_ablation --data-dir D --pretrained resnet50-0676ba61.pth [--only PACS]
cost:     48 cells of ResNet-50 at 224 x 224 a data set: a GPU; --dry-run foresees it
data:     PACS with its lists of files; Office-Home
paper:    Table IV. 86.81 and 69.66 without both, 82.30 and 68.98 for FedAvg in Table I: most of the gain is the recipe
ours:     as in table1_pacs_officehome.py
status:   not run by us on the real data, which may not be passed on; see results/lsi_emoji_styles.md
"""

from experiments.lsi.table1_pacs_officehome import PLAIN, SMALL, paper
from experiments.papers import Part, base, main

ROWS = {
    "neither": PLAIN,
    "L_di": {"aggregator": "mean"},
    "importance": PLAIN | {"aggregator": "importance"},
    "both": {"aggregator": "importance"},
}
PACS = {
    "neither": (87.55, 83.41, 98.06, 78.22, 86.81),
    "L_di": (88.44, 84.87, 97.84, 80.29, 87.86),
    "importance": (88.47, 84.19, 97.56, 77.81, 87.01),
    "both": (88.18, 85.12, 97.92, 81.62, 88.21),
}
OFFICE_HOME = {
    "neither": (77.04, 66.22, 57.26, 78.11, 69.66),
    "L_di": (76.75, 65.90, 58.12, 78.50, 69.82),
    "importance": (76.83, 65.78, 57.65, 78.96, 69.81),
    "both": (77.04, 66.71, 58.23, 79.30, 70.32),
}
PAIRS = [(name, "neither") for name in list(ROWS)[1:]]
HOME = base("lsi", dataset="OfficeHome", split="90/10")
PARTS = [
    Part("PACS", base("lsi"), ROWS, paper(("art_painting", "cartoon", "photo", "sketch"), PACS), PAIRS),
    Part("OfficeHome", HOME, ROWS, paper(("Product", "Art", "Clipart", "Real World"), OFFICE_HOME), PAIRS),
]

if __name__ == "__main__":
    main(__doc__, PARTS, SMALL)
