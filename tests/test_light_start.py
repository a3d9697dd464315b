"""What is loaded when, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

import hasslefree

HEAVY = ("torch", "transformers", "vl_convert", "datasets", "accelerate", "rich.table")


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LIGHT = f"""
import sys
def check(*heavy):
    assert not [name for name in heavy if name in sys.modules], sys.modules.keys()
import hasslefree
from hasslefree import Recipe
Recipe(rank=4)
check(*{HEAVY})
from typer.testing import CliRunner
from hasslefree.cli import app
assert CliRunner().invoke(app, ["compress", "--help"], prog_name="hasslefree").exit_code == 0
assert "transformers" in CliRunner().invoke(app, ["--version"], prog_name="hasslefree").output
check(*{[name for name in HEAVY if name != "rich.table"]})  # the help of typer draws tables of rich
"""


def test_what_needs_no_tensor_loads_nothing_heavy():
    assert run(f"{LIGHT}print('light')") == "light\n"


REGISTERED = """
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert AUTO_QUANTIZER_MAPPING["hasslefree"].__name__ == "HasslefreeQuantizer"
assert AUTO_QUANTIZATION_CONFIG_MAPPING["hasslefree"].__name__ == "HasslefreeConfig"
"""


@pytest.mark.parametrize(
    "imports",
    [
        "from transformers import AutoModelForCausalLM; import hasslefree",
        *(
            pytest.param(imports, marks=pytest.mark.nightly)
            for imports in (
                "import hasslefree; from transformers import AutoModelForCausalLM",
                "from hasslefree.checkpoint.plugin import HasslefreeConfig",
            )
        ),
    ],
)
def test_the_format_is_registered_whichever_is_imported_first(imports):
    assert run(f"{imports}{REGISTERED}print('registered')") == "registered\n"


def test_every_public_name_is_there_also_without_fcntl_and_loads_no_charts():
    """As on Windows: a module that cannot be imported. Oracle: the number of lines in __init__.pyi."""
    listed = (Path(hasslefree.__file__).parent / "__init__.pyi").read_text().count(" as ")
    names = "import hasslefree\nprint(len([getattr(hasslefree, name) for name in hasslefree.__all__]))"
    charts = "print([name for name in ('vl_convert',) if name in sys.modules])"
    assert run(f"import sys; sys.modules['fcntl'] = None\n{names}\n{charts}") == f"{listed}\n[]\n"
