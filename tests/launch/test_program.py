"""`hasslefree run`, each time in a process of its own, as it replaces its process."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hasslefree.errors import ProgramError
from hasslefree.launch.program import SITE, program_command

# It does not import hasslefree. The child process is a fresh interpreter, as those of data loaders and servers are.
LOADER = """
import json, multiprocessing, sys

def logits(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0, -1].tolist()

if __name__ == "__main__":
    folder, ids = sys.argv[1], json.loads(sys.argv[2])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply(logits, (folder, ids))
    print(json.dumps([logits(folder, ids), child]))
"""
SHOW = "import sys\nprint(sys.argv[1:], 'hasslefree' in sys.modules)\nsys.exit(7)\n"


def run(where, *arguments, **environment):
    """`hasslefree run` with these arguments, in the folder `where`."""
    command = [sys.executable, "-m", "hasslefree", "run", *map(str, arguments)]
    return subprocess.run(
        command, cwd=where, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    )


def test_a_module_that_does_not_know_hasslefree_loads_a_folder(out, tmp_path):
    """Oracle: the logits in this process."""
    (tmp_path / "loader.py").write_text(LOADER)
    ids = [5, 17, 3]
    done = run(tmp_path, "loader", out, json.dumps(ids))
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(out)(torch.tensor([ids])).logits[0, -1]
    for found in json.loads(done.stdout):
        torch.testing.assert_close(torch.tensor(found), expected)


@pytest.mark.parametrize("name", ["show", "show.py", "package"])
def test_arguments_and_exit_code_are_the_program_s(tmp_path, name):
    """Oracle: what was given. `--tasks a b` would be spread for a command of our own."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SHOW)
    given = ["--tasks", "a", "b", "--help", "--", "-x", ""]
    done = run(tmp_path, name, *given)
    assert (done.returncode, done.stdout) == (7, f"{given} True\n"), done.stderr


def test_a_console_script_is_found_beside_the_interpreter(tmp_path):
    """Oracle: torchrun, which starts processes of its own, gives each its rank."""
    (tmp_path / "rank.py").write_text(
        "import os, sys\nline = f\"rank {os.environ['RANK']} {'hasslefree' in sys.modules}\\n\"\n"
        "os.write(1, line.encode())  # at once, as the other process writes too\n"
    )
    done = run(tmp_path, "torchrun", "--nproc-per-node", "2", "rank.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 True", "rank 1 True"]


def test_the_environment_s_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')\n")
    (tmp_path / "show.py").write_text(SHOW)
    path = os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")])
    done = run(tmp_path, "show", PYTHONPATH=path)
    # Once for the interpreter of `hasslefree run`, and once for the program.
    assert done.stdout == "own\nown\n[] True\n", done.stderr


def test_an_interpreter_without_hasslefree_says_so_and_goes_on(tmp_path):
    (tmp_path / "show.py").write_text("print('went on')\n")
    # -S leaves site-packages and so hasslefree out; `import site` then does what the start would have done.
    command = [sys.executable, "-S", "-c", "import site; site.main(); import show"]
    (tmp_path / "hasslefree.py").write_text("raise ModuleNotFoundError('no hasslefree')\n")
    path = os.pathsep.join([str(SITE), str(tmp_path)])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.stdout == "went on\n", done.stderr
    assert "sitecustomize" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_program"], "there is no program 'no_such_program': neither a script in"),
        (["json"], "there is no program 'json'"),  # a package without __main__
        (["none.py"], "there is no file none.py"),
        (["a..b"], "there is no program 'a..b'"),
        (["broken.part"], "there is no program 'broken.part'"),  # a package that cannot be imported
        ([], "Missing argument"),
    ],
)
def test_a_program_that_is_not_there_is_one_message_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("1 / 0")
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if "no program" in message:
        assert "pip install" in done.stderr


def test_a_program_of_an_extra_names_the_extra(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("hasslefree.launch.program.is_runnable", lambda name: False)
    with pytest.raises(ProgramError, match=r'runs; check the name, or pip install "hasslefree\[eval\]"$'):
        program_command("lm_eval")


TASK = """
task: invented
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["a list", "a number"]
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.mark.nightly
def test_lm_eval_evaluates_a_folder(out, tmp_path):
    """Oracle: log-probabilities from whole forward passes in this process."""
    pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: pip install "hasslefree[eval]"')
    rows = [{"question": "Return the number of items in", "label": 0}, {"question": "The result is", "label": 1}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "invented.yaml").write_text(textwrap.dedent(TASK.format(file=file)))
    done = run(
        tmp_path, "lm_eval", "--model", "hf", "--model_args", f"pretrained={out},dtype=float32", "--device", "cpu",
        "--tasks", "invented", "--include_path", tmp_path / "tasks", "--output_path", tmp_path / "results",
        "--log_samples",
        HF_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "results").rglob("samples_invented_*.jsonl")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        question = tokenizer(sample["doc"]["question"])["input_ids"]
        for choice, response in zip(["a list", "a number"], sample["filtered_resps"], strict=True):
            answer = tokenizer(" " + choice)["input_ids"]
            with torch.no_grad():
                steps = model(torch.tensor([question + answer])).logits[0].double().log_softmax(-1)
            expected = sum(steps[len(question) - 1 + i, token].item() for i, token in enumerate(answer))
            assert float(response[0]) == pytest.approx(expected, rel=1e-4)
