import pytest
from tiny import tiny_backbone, tiny_federation

import fedjax_dg as fdg
from fedjax_dg.aggregators import AGGREGATORS
from fedjax_dg.algorithms import ALGORITHMS


@pytest.mark.parametrize("a", ALGORITHMS)
@pytest.mark.parametrize("g", AGGREGATORS)
def test_it(a, g, key):
    f = tiny_federation([[5, 3], [4, 0]], batch_size=2, station_rounds=2, participants=None)
    r = fdg.make_round(tiny_backbone(), ALGORITHMS[a](), f.topology, AGGREGATORS[g]())
    s, h = fdg.run(r, r.init(key), f, 2, key)
    print(h)
