"""What cannot be served is refused in one sentence with the remedy; and what vLLM imports needs no transformers."""

import subprocess
import sys

import pytest

from hasslefree.errors import ServeError
from hasslefree.serve.requirements import check_device, check_layers, check_vllm


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1.dev3+g1234", "0.32.5rc1"])
def test_the_versions_of_the_table_are_taken(version):
    check_vllm(version)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [("0.9.2", ': pip install "vllm==0.33.'), ("0.34.0", "update hasslefree, or pip"), ("1.0.0", "update hasslefree"),
     ("dev", "pip install")],
)  # fmt: skip
def test_other_versions_are_refused_with_the_remedy(version, remedy):
    with pytest.raises(ServeError) as caught:
        check_vllm(version)
    assert f"vLLM {version} is installed" in str(caught.value)
    assert remedy in str(caught.value)


def test_devices():
    check_device("cpu")
    check_device("cuda")
    with pytest.raises(ServeError, match="not on rocm: .*--to dense"):
        check_device("rocm")


def test_experts_are_refused():
    check_layers(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.shared_expert.up_proj"])
    with pytest.raises(
        ServeError, match=r"model.layers.0.mlp.experts.3.up_proj belongs to a mixture of experts .*--to dense"
    ):
        check_layers(["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"])


def test_what_vllm_imports_loads_neither_transformers_nor_what_is_not_installed_with_vllm():
    """vLLM 0.32 comes with a transformers that is older than the oldest that loads folders."""
    modules = "hasslefree.serve.fused, hasslefree.serve.requirements, hasslefree.checkpoint.entries"
    heavy = ("transformers", "datasets", "accelerate", "typer", "rich")
    script = f"import sys, {modules}\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
