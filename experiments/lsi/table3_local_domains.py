"""LSI, Table III: the global model on the clients' own domains, averaged plainly and by the parameters' importance.

command:  python -m experiments.lsi.table3_local_domains --data-dir D --pretrained resnet50-0676ba61.pth [--only PACS]
cost:     24 cells of ResNet-50 at 224 x 224 a data set: a GPU; --dry-run foresees it
data:     PACS with its lists of files; Office-Home
paper:    Table III; a column is a client's domain in the federation that holds another one out
ours:     accuracies on the clients' validation examples, of the round that those select (the paper does not say which
          examples these are)
status:   not run by us on the real data, which may not be passed on
"""

from itertools import permutations

from experiments.lsi.table1_pacs_officehome import SMALL
from experiments.papers import Part, base, main

ROWS = {"averaging": {"aggregator": "mean"}, "importance": {"aggregator": "importance"}}
PACS = {
    "art_painting": {"photo": (99.58, 99.06), "cartoon": (96.73, 96.73), "sketch": (96.65, 96.44)},
    "cartoon": {"photo": (99.69, 99.79), "art_painting": (96.35, 96.09), "sketch": (96.26, 95.96)},
    "photo": {"art_painting": (96.78, 96.52), "cartoon": (95.61, 96.35), "sketch": (96.57, 96.57)},
    "sketch": {"photo": (99.79, 99.79), "art_painting": (96.00, 96.86), "cartoon": (96.20, 96.56)},
}
OFFICE_HOME = {
    "Art": {"Clipart": (82.49, 82.61), "Product": (90.38, 90.70), "Real World": (83.69, 82.89)},
    "Clipart": {"Art": (75.44, 77.31), "Product": (90.54, 91.54), "Real World": (84.57, 84.93)},
    "Product": {"Art": (75.67, 76.71), "Clipart": (81.59, 83.13), "Real World": (83.93, 82.97)},
    "Real World": {"Art": (73.58, 76.11), "Clipart": (82.33, 81.93), "Product": (89.18, 89.70)},
}


def paper(numbers) -> dict[str, dict[str, float]]:
    return {
        row: {f"{own} ({out} held out)": numbers[out][own][i] for out, own in permutations(numbers, 2)}
        for i, row in enumerate(ROWS)
    }


PAIRS = [("importance", "averaging")]
PARTS = [
    Part("PACS", base("lsi"), ROWS, paper(PACS), PAIRS, columns="source"),
    Part(
        "OfficeHome",
        base("lsi", dataset="OfficeHome", split="90/10"),
        ROWS,
        paper(OFFICE_HOME),
        PAIRS,
        columns="source",
    ),
]

if __name__ == "__main__":
    main(__doc__, PARTS, SMALL)
