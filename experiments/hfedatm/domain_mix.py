"""HFedATM, heterogeneity: the partition's lambda at 1.0, 0.1 and 0.0 (every client the global mix, ... one domain each).

command:  python -m experiments.hfedatm.domain_mix --data-dir D [--only PACS-1.0 PACS-0.1 PACS-0.0] [--set KEY=VALUE]
          Amazon reviews also need --pretrained M, a folder of RoBERTa-base
cost:     96 cells for each data set and lambda; RoBERTa-base wants a GPU; --dry-run foresees it
data:     PACS, Office-Home, Terra Incognita, Amazon reviews
paper:    numbers for lambda = 1.0 are in main_table.py; those for 0.1 and 0.0 are not in the text we have, which says that
          HFedATM then gains little with FedAvg and FedProx and clearly with FedSR and FedIIR
ours:     as in main_table.py; clients of one domain share a station where that is possible (--set
          station_assignment=round-robin spreads them)
status:   not run by us on the real data, which may not be passed on; see results/hfedatm_emoji_styles.md
"""

from dataclasses import replace

from experiments.hfedatm.main_table import LENET, METHODS
from experiments.papers import Part, base, main, pairs, product

ROWS = product(METHODS, {"Avg": {"aggregator": "mean"}, "HFedATM": {"aggregator": "hfedatm"}})
CONFIGS = {
    "PACS": base("pacs", **LENET),
    "OfficeHome": base("office_home", **LENET),
    "TerraIncognita": base("terra_incognita", **LENET),
    "AmazonReviews": base("amazon_reviews"),
}
PARTS = [
    Part(f"{name}-{mix}", replace(config, domain_mix=mix), ROWS, against=pairs(ROWS, "HFedATM", "Avg"))
    for name, config in CONFIGS.items()
    for mix in (1.0, 0.1, 0.0)
]

if __name__ == "__main__":
    main(__doc__, PARTS, {"domain_mix": 0.5})
