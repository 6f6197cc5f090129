"""Networks, one family a file."""

from fedjax_dg.backbones.backbone import Backbone, Forward
from fedjax_dg.backbones.lenet import lenet5

BACKBONES = {"lenet5": lenet5}

__all__ = ["BACKBONES", "Backbone", "Forward", "lenet5"]
