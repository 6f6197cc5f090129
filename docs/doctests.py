"""For the API pages: examples in docstrings (``>>>``) as code."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts every block of doctest lines of a docstring between fences."""

    def on_instance(self, *, obj: Any, **rest: Any) -> None:
        if obj.is_alias or obj.docstring is None:
            return
        # from a prompt to the next empty line, as doctest reads them
        obj.docstring.value = re.sub(
            r"^( *)(>>> .*?)(?=\n *\n|\Z)", r"\1```pycon\n\1\2\n\1```", obj.docstring.value, flags=re.M | re.S
        )
