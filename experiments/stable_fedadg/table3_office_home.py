"""Stable-FedADG, Table 3: Office-Home in three settings, ResNet-50.

command:  python -m experiments.stable_fedadg.table3_office_home --data-dir D --pretrained resnet50-0676ba61.pth
cost:     96 cells for each of leave-one-domain-out, mixed and single-<domain>: a GPU; --dry-run foresees it
data:     Office-Home, 70 % of every domain for training
paper:    its numbers are in a table that is not in the text we have
ours:     as in table2_pacs.py
status:   not run by us on the real data, which may not be passed on; see results/stable_fedadg_emoji_styles.md
"""

from experiments.papers import base, main
from experiments.stable_fedadg.table2_pacs import ONE, settings

CONFIG = base("stable_fedadg", dataset="OfficeHome", backbone="resnet50")
PARTS = settings(CONFIG, ("Art", "Clipart", "Product", "Real World"))

if __name__ == "__main__":
    main(__doc__, PARTS, ONE)
