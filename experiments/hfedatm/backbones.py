"""HFedATM, other networks: averaging against HFedATM with ResNet-18 and VGG-11 on PACS, DeBERTa-base on Amazon reviews.

command:  python -m experiments.hfedatm.backbones --only PACS-resnet18 --data-dir D --pretrained resnet18-f37072fd.pth
          a part at a time, as each has its own weights; without --pretrained a network starts from scratch
cost:     48 cells a part, at 224 x 224 pixels: a GPU; --dry-run foresees it
data:     PACS; Amazon reviews
paper:    averages over the held-out domains; FedAvg, FedProx and other data sets are not in the text we have
ours:     whether the paper's networks are pretrained, their rates and rounds are not in the text either: those here are the
          FedDG Benchmark's for PACS where it gives them (batches of 32, Adam at 3e-5), and ours
status:   not run by us on the real data, which may not be passed on
"""

from experiments.papers import Part, base, main, pairs, product

METHODS = {name: {"algorithm": name.lower()} for name in ("FedAvg", "FedProx", "FedSR", "FedIIR")}
ROWS = product(METHODS, {"Avg": {"aggregator": "mean"}, "HFedATM": {"aggregator": "hfedatm"}})


def part(name: str, config, *numbers: float) -> Part:
    """``numbers``: FedSR and FedIIR, each with averaging and HFedATM."""
    paper = {row: {"average": number} for row, number in zip(list(ROWS)[4:], numbers, strict=True)}
    return Part(name, config, ROWS, paper, pairs(ROWS, "HFedATM", "Avg"))


PARTS = [
    part("PACS-resnet18", base("pacs"), 89.4, 92.8, 89.7, 93.0),
    part("PACS-vgg11", base("pacs", backbone="vgg11"), 88.3, 91.7, 88.7, 91.9),
    part("AmazonReviews-deberta", base("amazon_reviews", backbone="deberta_base"), 77.3, 81.2, 77.9, 81.9),
]

if __name__ == "__main__":
    main(__doc__, PARTS)
