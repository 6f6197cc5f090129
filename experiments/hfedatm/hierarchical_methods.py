"""HFedATM against methods made for hierarchies: MTGC and FedRC, which exchange statistics or gradients of several tiers.

command:  python -m experiments.hfedatm.hierarchical_methods --data-dir D [--only PACS] [--set KEY=VALUE]
          Amazon reviews also need --pretrained M, a folder of RoBERTa-base
cost:     60 cells a data set; LeNet-5 on pictures is cheap, RoBERTa-base wants a GPU; --dry-run foresees it
data:     PACS, Office-Home, Terra Incognita, Amazon reviews
paper:    HFedATM, with FedAvg and FedSR, is best on all four; the numbers are not in the text we have
ours:     as in main_table.py; MTGC corrects plain SGD (its rate here is ours); FedRC is the rapid-converged hierarchical
          method (Kou et al., 2024) at both tiers, on texts by their features, as token ids have no mean colour
status:   not run by us on the real data, which may not be passed on
"""

from experiments.hfedatm.main_table import LENET
from experiments.papers import Part, base, main

ROWS = {
    "HierFAVG": {"algorithm": "fedavg", "aggregator": "mean"},
    "MTGC": {"algorithm": "mtgc", "aggregator": "mean", "client_optimizer": "sgd", "client_lr": 0.05},
    "FedRC": {"algorithm": "fedavg", "aggregator": "fedrc", "station_aggregator": "fedrc"},
    "FedAvg + HFedATM": {"algorithm": "fedavg", "aggregator": "hfedatm"},
    "FedSR + HFedATM": {"algorithm": "fedsr", "aggregator": "hfedatm"},
}
PAIRS = [("FedAvg + HFedATM", name) for name in ("HierFAVG", "MTGC", "FedRC")] + [("FedSR + HFedATM", "HierFAVG")]
PARTS = [
    Part("PACS", base("pacs", **LENET), ROWS, against=PAIRS),
    Part("OfficeHome", base("office_home", **LENET), ROWS, against=PAIRS),
    Part("TerraIncognita", base("terra_incognita", **LENET), ROWS, against=PAIRS),
    Part("AmazonReviews", base("amazon_reviews", settings={"of": "features"}), ROWS, against=PAIRS),
]

if __name__ == "__main__":
    main(__doc__, PARTS)
