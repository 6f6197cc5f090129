"""Images in array_record files as an array that is read when it is indexed; TensorFlow is not needed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Records:
    """uint8 RGB [M, size, size, 3] in array_record files; ``records[rows]`` reads those rows.

    ``places``: [M], where each row is among the records of all ``splits`` one after another. Can be pickled.
    """

    folder: str
    splits: tuple[str, ...]
    places: NDArray[np.int64]
    size: int

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.places), self.size, self.size, 3

    def __len__(self) -> int:
        return len(self.places)

    def subset(self, rows: NDArray[np.integer]) -> Records:
        return Records(self.folder, self.splits, self.places[rows], self.size)

    def __getitem__(self, rows) -> np.ndarray:
        source = source_of(self.folder, self.splits)
        if isinstance(rows, int | np.integer):
            return source[int(self.places[rows])]["image"]
        found = source.__getitems__(self.places[rows].tolist()) if len(self.places[rows]) else []
        return np.stack([record["image"] for record in found]) if found else np.empty((0, *self.shape[1:]), np.uint8)


@functools.lru_cache(maxsize=8)
def source_of(folder: str, splits: tuple[str, ...], pixels: bool = True) -> Any:
    """The records of array_record files, opened once in a process; without ``pixels`` these are not decoded."""
    import tensorflow_datasets as tfds  # takes half a second

    decoders = None if pixels else {"image": tfds.decode.SkipDecoding()}
    builder: Any = tfds.builder_from_directory(folder)
    return builder.as_data_source(split="+".join(splits), decoders=decoders)
