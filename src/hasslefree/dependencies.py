"""Raise a clear error when a torch or transformers is imported that is too old for the package."""

import re
import sys
from types import ModuleType

from hasslefree.errors import VersionError

# (major, minor) of the oldest versions that work, as in pyproject.toml.
OLDEST = {"torch": (2, 6), "transformers": (5, 20)}


def check_version(library: ModuleType) -> None:
    """Raise a VersionError if an imported library is too old; not inside vLLM, which chooses its
    transformers.
    """
    major, minor = OLDEST[library.__name__]
    numbers = re.match(r"(\d+)\.(\d+)", str(library.__version__))
    if (
        numbers is None
        or (int(numbers[1]), int(numbers[2])) >= (major, minor)
        or "vllm" in sys.modules
    ):
        return
    installed = f"{library.__name__} {library.__version__}"
    needed = f"{library.__name__}>={major}.{minor}"
    raise VersionError(
        f'{installed} is too old for hasslefree, which needs {needed}: pip install "{needed}"'
    )
