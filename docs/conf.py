"""The documentation site: `make docs` builds it from this folder, without a network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "hasslefree"
copyright = "the hasslefree developers, Apache-2.0"
language = "en"
root_doc = "index"
exclude_patterns = ["_ext"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # MathJax from the package: formulas need no network
    "sphinx_copybutton",
    "from_code",
]

html_theme = "furo"
html_title = "hasslefree"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
# Blocks such as ```vectors are no programming language.
suppress_warnings = ["misc.highlighting_failure"]
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "build" / "docs" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 600

# Docstrings quote code with single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False

nitpicky = True
# There is no network for the inventories of other projects, and these names have no page of their own here.
nitpick_ignore_regex = [("py:.*", r"(?!hasslefree\.).*"), ("py:.*", r"hasslefree\.\w+\..*")]

linkcheck_timeout = 20
linkcheck_workers = 4
