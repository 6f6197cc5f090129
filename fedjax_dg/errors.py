"""The wording of errors that several parts of the library raise."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, given: str, allowed: Iterable[str]) -> ValueError:
    """Builds, and does not raise, the error for a name that is not one of the allowed names.

    Letter case is ignored when the nearest name is looked for, so `pacs` finds `PACS`.

    >>> raise unknown("data set", "emoji_stles", ["emoji_styles"])
    Traceback (most recent call last):
    ValueError: Unknown data set 'emoji_stles'; did you mean 'emoji_styles'? Available: emoji_styles.

    Args:
      kind: what is named, in words: `data set`, `algorithm`, `held-out domain`.
      given: the name that was given.
      allowed: all names that would have worked, in the order to show them.
    """
    names = [str(name) for name in allowed]
    available = ", ".join(names) if names else "none"
    by_lower_case = {name.lower(): name for name in names}
    nearest = difflib.get_close_matches(str(given).lower(), by_lower_case, n=1, cutoff=0.5)
    if not nearest:
        return ValueError(f"Unknown {kind} {given!r}; available: {available}.")
    return ValueError(f"Unknown {kind} {given!r}; did you mean {by_lower_case[nearest[0]]!r}? Available: {available}.")
