"""hasslefree: make a language model smaller: every linear layer of its blocks becomes sparse plus
low-rank.

Importing this package registers its format with transformers, before or after transformers is
imported itself, so that `from_pretrained` loads the folders that `compress` writes. The public
names are listed in __init__.pyi.
"""

import sys
from types import ModuleType

import lazy_loader
from wrapt import register_post_import_hook

from hasslefree.dependencies import OLDEST, check_version

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _register(_module: ModuleType) -> None:
    plugin = sys.modules.get("hasslefree.checkpoint.plugin")
    if plugin is not None and not hasattr(plugin, "register"):
        return  # it is being imported, and registers itself at its end

    from hasslefree.checkpoint.plugin import register_format

    register_format()


for _library in OLDEST:
    register_post_import_hook(check_version, _library)
# At once, if transformers has loaded its quantizers already; else as soon as it does.
register_post_import_hook(_register, "transformers.quantizers.auto")
