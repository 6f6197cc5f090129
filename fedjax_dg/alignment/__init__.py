"""Alignment of weights: several models into one basis before they are merged."""

from fedjax_dg.alignment.fot import Alignment, align, assign, filter_cost, match
from fedjax_dg.alignment.groups import Axis, Group, permute, take_units

__all__ = ["Alignment", "Axis", "Group", "align", "assign", "filter_cost", "match", "permute", "take_units"]
