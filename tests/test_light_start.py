"""What is loaded when, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

import hasslefree

HEAVY = ("torch", "transformers", "matplotlib", "datasets", "accelerate", "rich.table")


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", [
    "import hasslefree",
    "from hasslefree import Recipe; Recipe(rank=4)",
    "from typer.testing import CliRunner; from hasslefree.cli import app; "
    "print(CliRunner().invoke(app, ['compress', '--help'], prog_name='hasslefree').exit_code)",
    "from typer.testing import CliRunner; from hasslefree.cli import app; "
    "assert 'transformers' in CliRunner().invoke(app, ['--version'], prog_name='hasslefree').output",
])  # fmt: skip
def test_what_needs_no_tensor_loads_nothing_heavy(script):
    # The help of typer draws tables of rich.
    heavy = [name for name in HEAVY if name != "rich.table" or "Cli" not in script]
    assert run(f"{script}\nimport sys; print([m for m in {heavy} if m in sys.modules])").split("\n")[-2] == "[]"


REGISTERED = """
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert AUTO_QUANTIZER_MAPPING["hasslefree"].__name__ == "HasslefreeQuantizer"
assert AUTO_QUANTIZATION_CONFIG_MAPPING["hasslefree"].__name__ == "HasslefreeConfig"
"""


@pytest.mark.parametrize(
    "imports",
    ["import hasslefree, transformers", "import transformers, hasslefree",
     "from transformers import AutoModelForCausalLM; import hasslefree",
     "import hasslefree; from transformers import AutoModelForCausalLM",
     "from hasslefree.folder.plugin import HasslefreeConfig", "import hasslefree.run.blockwise"],
)  # fmt: skip
def test_the_format_is_registered_whichever_is_imported_first(imports):
    assert run(f"{imports}{REGISTERED}print('registered')") == "registered\n"


def test_it_imports_where_there_is_no_fcntl():
    """As on Windows: a module that cannot be imported."""
    modules = "hasslefree, hasslefree.run.compress, hasslefree.folder.journal"
    assert run(f"import sys; sys.modules['fcntl'] = None\nimport {modules}\nprint('imported')") == "imported\n"


def test_every_public_name_is_there():
    """Oracle: the number of lines in __init__.pyi, which type checkers read."""
    listed = (Path(hasslefree.__file__).parent / "__init__.pyi").read_text().count(" as ")
    found = run("import hasslefree\nprint(len([getattr(hasslefree, name) for name in hasslefree.__all__]))")
    assert int(found) == listed
