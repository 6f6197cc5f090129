"""The suite goes algorithm by algorithm, and lets go of one's programs before the next: a process holds only so many."""

import jax
import pytest


def algorithm_of(item) -> str:
    given = getattr(item, "callspec", None)
    params = {} if given is None else given.params
    return params["names"][0] if "names" in params else params.get("algorithm", "")


def pytest_collection_modifyitems(items):
    here = [i for i, item in enumerate(items) if "test_contract.py" in item.nodeid]
    for place, item in zip(here, sorted((items[i] for i in here), key=algorithm_of)):
        items[place] = item


@pytest.fixture(autouse=True)
def one_algorithm_at_a_time(request):
    kept = request.module
    if algorithm_of(request.node) != getattr(kept, "current_algorithm", ""):
        kept.current_algorithm = algorithm_of(request.node)
        for cached in (kept.case_of, kept.trace_of, kept.spread_over):
            cached.cache_clear()
        jax.clear_caches()
