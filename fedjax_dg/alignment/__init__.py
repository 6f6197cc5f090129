"""Alignment of weights: several models into one basis before they are merged."""

from fedjax_dg.alignment.fot import (
    Alignment,
    Matching,
    align,
    align_all,
    assign,
    assign_within,
    filter_cost,
    match,
    resize_kernels,
    transport,
)
from fedjax_dg.alignment.groups import Axis, Group, carry, permute, read_by, take_units

__all__ = [
    "Alignment",
    "Axis",
    "Group",
    "Matching",
    "align",
    "align_all",
    "assign",
    "assign_within",
    "carry",
    "filter_cost",
    "match",
    "permute",
    "read_by",
    "resize_kernels",
    "take_units",
    "transport",
]
