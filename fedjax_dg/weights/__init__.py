"""Pretrained weights from PyTorch's files, without PyTorch; and weights of our own, for networks without published ones."""

from fedjax_dg.weights.convert import find_leaves, load, save
from fedjax_dg.weights.readers import metadata, read

__all__ = ["find_leaves", "load", "metadata", "read", "save"]
