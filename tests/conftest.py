"""Every test runs with the jaxtyping annotations of the library turned into checks."""

import gc
import os
import re

# several devices for what spreads over a mesh, also in processes that tests start: how many there are decides how XLA
# divides a product among threads, and so its rounding; everything else uses the first
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

# most of a test is XLA compiling a program that runs for milliseconds: a quarter of the time without most of its
# optimizations, without its newer way to write loops, and with all of a program in one piece
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_enable_compilation_cache", False)  # the command line turns it on

# no module of the package is imported above: the hook sees them all
install_import_hook("fedjax_dg", "beartype.beartype")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """``--dist loadfile`` (a file's tests share what they compile), but of the contract suite an algorithm at a time."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            return file, re.split(r"[-\]]", test.partition("[")[2])[0] if "test_contract.py" in file else ""

    config.option.loadscopereorder = False  # in the order of collection
    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    """The contract suite last: small pieces of work, with which all processes end at about the same time."""
    items.sort(key=lambda item: "test_contract.py" in item.nodeid)


def pytest_collection_finish():
    """What imports made stays, and the garbage collector looks less often at the rest: JAX makes much while it traces."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(scope="module")
def full_optimization():
    """For what runs longer than it compiles, or is timed; also in processes that the tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "false")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """Let go of a module's compiled programs when it ends: with many hundreds in a process, XLA's compiler crashes."""
    yield
    jax.clear_caches()
