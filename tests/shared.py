"""Programs that are compiled once for all the runs of a test module, as most of a small run is compiling."""

import contextlib

import pytest

from fedjax_dg import cells, cli
from fedjax_dg.cells import shapes_of
from fedjax_dg.config import aggregator_options, algorithm_options, topology


@contextlib.contextmanager
def one_compilation():
    """Rounds of the same options, and their programs, are made once while this is open. Yields what was compiled."""
    rounds, compiled, rounds_of, compile_block = {}, {}, cells.rounds_of, cells.compile_block

    def same_rounds(grid, aggregator, together=False):
        config = grid.config
        options = algorithm_options(config.algorithm) | aggregator_options(aggregator)
        settings = [(k, v) for k, v in config.settings.items() if k in options]
        key = repr((config.algorithm, aggregator, topology(config), settings, together))
        if key not in rounds:
            rounds[key] = rounds_of(grid, aggregator, together)
        return rounds[key]

    def one_program(rounds, numbers, federation, length, at_once=1):
        key = (id(rounds), shapes_of(federation), length, at_once)
        if key not in compiled:
            compiled[key] = compile_block(rounds, numbers, federation, length, at_once)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (cli, cells):
            patch.setattr(module, "rounds_of", same_rounds)
            patch.setattr(module, "compile_block", one_program)
        yield compiled
