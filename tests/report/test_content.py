"""What a report reads from folders and files, and what it says of those that are not as they should be."""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from hasslefree.checkpoint.record import read_record
from hasslefree.errors import CheckpointError, ModelError
from hasslefree.files import read_json
from hasslefree.progress import PhaseTime
from hasslefree.report.content import OUTSIDE, model_name, place, places, read_content, spectrum
from hasslefree.report.seconds import seconds_file, write_seconds
from tests.report.folders import compressed, edit, evaluation


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return compressed(tmp_path_factory.mktemp("content") / "out")


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "out")


@pytest.mark.parametrize(("out", "width", "rank"), [(7, 9, 3), (9, 7, 7), (2, 5, 4), (5, 5, 1)])
def test_the_spectrum_is_that_of_the_product(out, width, rank):
    """Oracle: the SVD of the whole matrix. A rank above a side leaves as many values as the side has."""
    u, v = torch.randn(out, rank), torch.randn(rank, width)
    whole = torch.linalg.svdvals(u.double() @ v.double())
    found = spectrum(u, v)
    torch.testing.assert_close(found, whole[: len(found)])
    assert len(found) == min(out, width, rank)


def test_a_run_is_what_the_folder_holds(folder):
    """Oracles: the loaded model's own matrices, and compression.json."""
    (run,) = read_content([folder]).runs
    stored = json.loads((folder / "compression.json").read_text())
    assert [layer.relative_error for layer in run.record.layers] == [row["relative_error"] for row in stored["layers"]]
    name = next(name for name, values in run.spectra.items() if any(values))
    layer = AutoModelForCausalLM.from_pretrained(folder).get_submodule(name)
    whole = torch.linalg.svdvals(layer.low_rank_u.double() @ layer.low_rank_v.double())[:2]
    found = torch.tensor(run.spectra[name])
    torch.testing.assert_close(found, whole / whole[0], check_dtype=False)
    assert len(run.spectra) == 14
    assert (run.name, run.command, run.times) == ("out", None, None), "segments were given, and nothing was timed"


def test_the_spectrum_of_factors_in_eight_bits(tmp_path):
    """Oracle: the SVD of the loaded model's own L."""
    (run,) = read_content([compressed(tmp_path / "out", factor_bits=8)]).runs
    layer = AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_submodule("model.layers.1.mlp.up_proj")
    u, v = layer.factors()
    whole = torch.linalg.svdvals(u.double() @ v.double())[:2]
    assert whole.all()
    found = torch.tensor(run.spectra["model.layers.1.mlp.up_proj"])
    torch.testing.assert_close(found, whole / whole[0], check_dtype=False)


def test_seconds_are_those_of_this_compression_and_of_no_other(folder):
    report = read_record(folder)
    layers = tuple(dataclasses.replace(layer, seconds=float(index)) for index, layer in enumerate(report.layers))
    phases = (PhaseTime("reading the text", 1.25), PhaseTime("solving", 90.5))
    for name in ("config.json", "model.safetensors"):  # the folder may be within that of the dense model
        (folder.parent / name).touch()
    write_seconds(folder, dataclasses.replace(report, layers=layers, seconds=99.5, phases=phases))
    (run,) = read_content([folder]).runs
    assert (run.times.seconds, run.times.phases) == (99.5, phases)
    assert run.times.layers == {layer.name: layer.seconds for layer in layers}
    edit(folder, lambda content: content.update(seqlen=17))
    assert read_content([folder]).runs[0].times is None
    write_seconds(folder, report)
    seconds_file(folder).write_text(json.dumps(read_json(seconds_file(folder)) | {"seconds": "long"}))
    with pytest.raises(CheckpointError, match="out.seconds.json is damaged"):
        read_content([folder])


def test_evaluations_find_their_models(folder, tmp_path, monkeypatch):
    """In the folder, by the path of the folder however it is written, and of other models."""
    monkeypatch.chdir(tmp_path)
    tasks = {"tasks": {"piqa": {"value": 0.75}}, "average": 0.75, "limit": 8}
    evaluation(folder / "evaluation.json", "anywhere", 40.0)
    evaluation(folder / "evaluation-1.json", "anywhere", 39.0)
    assert read_content([folder]).runs[0].evaluation.perplexity == {"held_out.txt": 39.0}, "the first file wins"
    named = evaluation(tmp_path / "tasks.json", "./out", 41.0, **tasks)
    dense = evaluation(tmp_path / "dense.json", "a/base", 30.0)
    content = read_content([folder, dense, named])
    assert content.runs[0].evaluation.perplexity == {"held_out.txt": 41.0}, "what is named wins"
    assert (content.runs[0].evaluation.tasks, content.runs[0].evaluation.limit) == ({"piqa": 0.75}, 8)
    assert {name: found.perplexity for name, found in content.others.items()} == {"a/base": {"held_out.txt": 30.0}}


@pytest.mark.parametrize("name", ["a/base", "./a/base", "cache/models--a--base/snapshots/c0ffee"])
def test_an_evaluation_of_the_dense_model_in_the_folder(name, folder):
    edit(folder, lambda content: content.update(model="a/base"))
    evaluation(folder / "evaluation.json", folder, 40.0)
    evaluation(folder / "evaluation-dense.json", name, 30.0)
    content = read_content([folder])
    assert content.runs[0].evaluation.perplexity == {"held_out.txt": 40.0}
    assert content.others["a/base"].perplexity == {"held_out.txt": 30.0}


@pytest.mark.parametrize(("limit", "kept"), [(8, {"piqa": 0.75}), (9, {})])
def test_tasks_of_several_files_are_those_on_as_many_rows(limit, kept, folder):
    evaluation(folder / "evaluation.json", folder, 40.0, tasks={"piqa": {"value": 0.75}}, limit=8)
    evaluation(folder / "evaluation-1.json", folder, 40.0, tasks={"rte": {"value": 0.5}}, limit=limit)
    assert read_content([folder]).runs[0].evaluation.tasks == {"rte": 0.5} | kept


def test_texts_of_the_same_file_name_stay_apart(folder):
    rows = {path: {"perplexity": float(len(path))} for path in ("a/test.txt", "de/test.txt", "a/code.py")}
    (folder / "evaluation.json").write_text(json.dumps({"model": str(folder), "perplexity": rows}))
    perplexity = read_content([folder]).runs[0].evaluation.perplexity
    assert perplexity == {"a/test.txt": 10.0, "de/test.txt": 11.0, "code.py": 9.0}


def test_texts_of_the_same_file_name_in_two_files_stay_apart(folder, tmp_path):
    """A path of which another is the end may be the same text, measured from another folder."""
    texts = {"1": "en/test.txt", "2": "de/test.txt", "3": "code.py"}
    for number, path in texts.items():
        rows = {path: {"perplexity": float(number)}}
        (folder / f"evaluation{number}.json").write_text(json.dumps({"model": str(folder), "perplexity": rows}))
    rows = {"/home/a/code.py": {"perplexity": 4.0}}
    (tmp_path / "dense.json").write_text(json.dumps({"model": "a/base", "perplexity": rows}))
    content = read_content([folder, tmp_path / "dense.json"])
    assert content.runs[0].evaluation.perplexity == {"en/test.txt": 1.0, "de/test.txt": 2.0, "code.py": 3.0}
    assert content.others["a/base"].perplexity == {"code.py": 4.0}


def test_a_model_whose_name_is_written_in_two_ways_is_one(folder, tmp_path):
    for number, name in enumerate(("a/base", "./a/base", "a/base/")):
        rows = {f"{number}.txt": {"perplexity": 1.0 + number}}
        (tmp_path / f"{number}.json").write_text(json.dumps({"model": name, "perplexity": rows}))
    content = read_content([folder, *sorted(tmp_path.glob("*.json"))])
    assert {name: found.perplexity for name, found in content.others.items()} == {
        "a/base": {"0.txt": 1.0, "1.txt": 2.0, "2.txt": 3.0}
    }


def test_an_evaluation_brings_that_of_its_dense_model(folder, tmp_path):
    of_dense = {"model": "a/base", "perplexity": {"held_out.txt": {"perplexity": 30.0}}, "versions": {}}
    evaluation(folder / "evaluation.json", "anywhere", 40.0, dense=of_dense)
    content = read_content([folder])
    assert content.runs[0].evaluation.perplexity == {"held_out.txt": 40.0}
    assert {name: found.perplexity for name, found in content.others.items()} == {"a/base": {"held_out.txt": 30.0}}
    evaluation(folder / "evaluation.json", "anywhere", 40.0, dense={"model": 3})
    with pytest.raises(CheckpointError, match="no results of .*model must be a valid string"):
        read_content([folder])


KL = {"mean": 0.0123, "median": 0.004, "percentile_99": 0.2, "same_top_token": 0.9753}


def test_an_evaluation_brings_its_kl(folder, tmp_path):
    evaluation(folder / "evaluation.json", "anywhere", 40.0, KL)
    content = read_content([folder])
    assert content.runs[0].evaluation.kl == {"held_out.txt": KL}
    without = evaluation(tmp_path / "without.json", folder, 41.0)
    assert read_content([folder, without]).runs[0].evaluation.kl == {}, "of the same measurement as the perplexity"
    evaluation(folder / "evaluation.json", "anywhere", 40.0, KL | {"mean": -1})
    with pytest.raises(CheckpointError, match="no results of .*mean must be at least 0"):
        read_content([folder])


def test_names_tell_folders_apart(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "y" / "out")
    assert [run.name for run in read_content([folder, other]).runs] == ["out", "y/out"]


DAMAGE = {
    "no JSON": (
        lambda f: (f / "compression.json").write_text("{"),
        r"out/compression.json cannot be read: .*; compress the model again",
    ),
    "no text": (
        lambda f: (f / "compression.json").write_bytes(b'{"layers": "\xff"}'),
        r"out/compression.json cannot be read: .*; compress the model again",
    ),
    "gone": (
        lambda f: (f / "compression.json").unlink(),
        r"out/compression.json cannot be read: .*; compress the model again",
    ),
    "a field": (lambda f: edit(f, lambda c: c.pop("layers")), "lists no layers"),
    "a layer's": (lambda f: edit(f, lambda c: c["layers"][0].pop("rank")), "'rank' is missing"),
    "a type": (lambda f: edit(f, lambda c: c["layers"][0].update(rank="4")), "rank .*, got '4'"),
    "no list": (lambda f: edit(f, lambda c: c.update(layers=[3])), "is not valid"),
    "no layers": (lambda f: edit(f, lambda c: c.update(layers=[])), "lists no layers"),
    "NaN": (
        lambda f: edit(f, lambda c: c["layers"][0].update(relative_error=float("nan"))),
        "relative_error.* got nan",
    ),
    "infinite": (
        lambda f: edit(f, lambda c: c["layers"][0].update(history=[1, float("inf")])),
        "history must be a finite number",
    ),
    "no rows": (lambda f: edit(f, lambda c: c["layers"][0].update(out=0)), "shape must be at least 1, got 0"),
    "a shard": (lambda f: next(f.glob("*.safetensors")).unlink(), "is missing"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_one_message(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read_content([folder])


def test_what_is_no_folder_and_no_result_is_refused(folder, tmp_path):
    figures = '{"model": "m", "perplexity": {"a": {"perplexity": %s}}}'
    wrong = {"list": "[]", "other": '{"model": "m"}', "nan": figures % "NaN", "text": figures % '"<b>"'}
    for name, content in wrong.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=name):
            read_content([folder, tmp_path / name])
    with pytest.raises(ModelError, match="at least one folder"):
        read_content([tmp_path / "list"])
    with pytest.raises(ModelError, match="none does not exist; name a folder"):
        read_content([folder, tmp_path / "none"])
    with pytest.raises(ModelError, match="twice"):
        read_content([folder, folder / ".." / "out"])


def test_the_places_of_layers_by_hand():
    names = ["model.layers.10.self_attn.q_proj", "model.layers.2.self_attn.q_proj", "model.layers.2.mlp.up_proj"]
    assert places(names) == dict(zip(names, [(10, "q_proj"), (2, "q_proj"), (2, "up_proj")], strict=True))
    assert [*places(["h.0.attn.c_proj", "h.0.mlp.c_proj"]).values()] == [(0, "attn.c_proj"), (0, "mlp.c_proj")]
    assert place("m.layers.3.mlp.experts.5.w1") == (3, "mlp.experts.w1")
    assert place("lm_head") == (OUTSIDE, "lm_head")
    experts = ["m.layers.0.mlp.experts.1.w1", "m.layers.0.mlp.experts.2.w1", "m.layers.0.mlp.shared.w1"]
    assert [kind for _, kind in places(experts[:2]).values()] == ["w1", "w1"]
    assert [kind for _, kind in places(experts).values()] == ["mlp.experts.w1", "mlp.experts.w1", "mlp.shared.w1"]


def test_the_short_name_of_a_model_by_hand():
    names = {"owner/name": "owner/name", "/home/me/models/name": "name", "name": "name", "a/b/name": "name"}
    assert {model: model_name(model) for model in names} == names
