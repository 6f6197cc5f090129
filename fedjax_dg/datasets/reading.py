"""Rows of a data set in blocks, decoded ahead of time in parallel worker processes (grain)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

#: Blocks that each worker process keeps ready.
AHEAD = 2
#: Threads that read where no process does; Pillow lets go of Python while it decodes.
THREADS = 4


@runtime_checkable
class Readable(Protocol):
    """Rows [M, ...] that are read by their numbers: an array, memory-mapped or not, ``Images``, ``Records``."""

    shape: Any
    dtype: Any

    def __len__(self) -> int: ...

    def __getitem__(self, rows, /) -> Any: ...


@dataclass(frozen=True)
class Blocks:
    """A grain data source: block i is ``inputs`` at ``rows[i]``, zeros where a row is -1."""

    inputs: Readable  # [M, ...]
    rows: Sequence[NDArray[np.integer]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> np.ndarray:
        rows = self.rows[index]
        out = np.zeros((len(rows), *self.inputs.shape[1:]), self.inputs.dtype)
        real = rows >= 0
        out[real] = self.inputs[rows[real]]
        return out


def read(inputs: Readable, rows: Sequence[NDArray[np.integer]], workers: int = 0) -> Generator[np.ndarray]:
    """Blocks [U, ...] of ``inputs`` [M, ...] by the rows [U] of each (-1: zeros), in order, while the next are being read.

    ``workers``: processes that decode; 0 = threads of this one. Neither changes what is read. Processes start anew, so a
    script that asks for some must do its work under ``if __name__ == "__main__"``. Raises what decoding raises.
    """
    if isinstance(inputs, np.ndarray):
        workers = 0  # nothing to decode, and each process would be sent a copy
    import grain  # takes half a second
    from absl import flags

    if not flags.FLAGS.is_parsed():  # grain's processes ask absl's flags, which only absl's own programs parse
        flags.FLAGS.mark_as_parsed()
    source = grain.MapDataset.source(Blocks(inputs, rows))  # type: ignore  # no Sequence, but all that is asked of one
    num_threads = 1 if workers else THREADS
    threads = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=max(num_threads, AHEAD))
    blocks = source.to_iter_dataset(threads)
    if workers:
        # as bytes: grain would send arrays through shared memory, of which containers have little and which it does not free
        # to the last
        blocks = blocks.map(np.ndarray.tobytes)
        blocks = blocks.mp_prefetch(grain.MultiprocessingOptions(workers, per_worker_buffer_size=AHEAD))
    iterator: Any = iter(blocks)
    try:
        for block in iterator:
            yield np.frombuffer(block, inputs.dtype).reshape(-1, *inputs.shape[1:]) if workers else block
    finally:
        iterator.close()


def read_all(inputs: Readable, workers: int = 0, size: int = 64) -> np.ndarray:
    """All of ``inputs`` in memory; arrays as they are."""
    if isinstance(inputs, np.ndarray):
        return inputs
    rows = np.full(-(-len(inputs) // size) * size, -1)
    rows[: len(inputs)] = np.arange(len(inputs))
    out = np.empty(inputs.shape, inputs.dtype)
    for number, block in enumerate(read(inputs, list(rows.reshape(-1, size)), workers)):
        part = out[number * size : (number + 1) * size]
        part[:] = block[: len(part)]
    return out
