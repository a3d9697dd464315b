"""Rotary position embeddings in the config.json of an export, for readers older than transformers 5."""

import json

import pytest
from transformers import AutoConfig

from hasslefree.exports.export import write_older_rotary

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# By hand: what transformers 4 wrote for the same model.
OLDER = {
    "llama": ({"rope_theta": 1e5, "rope_type": "default"}, {"rope_theta": 1e5}),
    "llama, scaled": ({"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "phi": (
        {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "gpt2": (None, {}),
}


@pytest.mark.parametrize(("parameters", "expected"), OLDER.values(), ids=OLDER)
@pytest.mark.parametrize("nested", [False, True])
def test_older_readers_find_what_they_know(tmp_path, parameters, expected, nested):
    own = {} if parameters is None else {"rope_parameters": parameters}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": own} if nested else own))
    write_older_rotary(file)
    found = json.loads(file.read_text())
    assert (found["text_config"] if nested else found) == own | expected


def test_an_older_entry_that_is_null_is_none(tmp_path):
    parameters, expected = OLDER["llama, scaled"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"rope_parameters": parameters, "rope_theta": None, "rope_scaling": None}))
    write_older_rotary(file)
    assert json.loads(file.read_text()) == {"rope_parameters": parameters} | expected


def test_parameters_by_type_of_layer_stay_as_they_are(tmp_path):
    """No older entry says them all."""
    own = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(own))
    write_older_rotary(file)
    assert json.loads(file.read_text()) == own


@pytest.mark.parametrize("kind", ["llama", "llama, scaled", "phi"])
@pytest.mark.parametrize("older_alone", [False, True])
def test_transformers_reads_the_same_from_both(tmp_path, kind, older_alone):
    """Oracle: the configuration read before the older entries were added."""
    parameters, _ = OLDER[kind]
    file = tmp_path / "config.json"
    content = {"model_type": kind.split(",")[0], "rope_parameters": parameters, "max_position_embeddings": 256}
    file.write_text(json.dumps(content))
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters
    write_older_rotary(file)
    if older_alone:
        content = json.loads(file.read_text())
        del content["rope_parameters"]
        file.write_text(json.dumps(content))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == expected
