"""Executes notebooks and writes them with their outputs: ``python colab/build.py [NAME ...]``, all by default.

The ``.py`` files (jupytext's ``py:percent``) are what is edited; the ``.ipynb`` files are made of them, here.
Needs ``pip install jupytext nbclient ipykernel``.
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
NOTEBOOKS = "start_here", "your_own_algorithm", "sweep", "many_devices"


def build(name: str) -> None:
    """Execute ``NAME.py`` from top to bottom and write ``NAME.ipynb``."""
    notebook = jupytext.read(HERE / f"{name}.py")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{name}-{number}"  # else drawn anew every time
    NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": HERE}}).execute()
    notebook.metadata = {
        "jupytext": {"formats": "py:percent,ipynb"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, HERE / f"{name}.ipynb")


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        build(name)
