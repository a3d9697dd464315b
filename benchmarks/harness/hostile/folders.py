"""Kinds of damage in model folders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.hostile.damage import (
    INDEX,
    all_of,
    config,
    copied,
    edited,
    file,
    filled,
    gone,
    link,
    raw_weights,
    shaped,
    weights,
    with_fields,
)
from harness.hostile.fault import (
    EITHER,
    LOADERS,
    READERS,
    WORKS_OR_NOT,
    Fault,
    usual,
)


def configurations() -> Iterator[Fault]:
    kind = "what transformers raises"
    values: dict[str, dict[str, Any]] = {
        "rope_parameters is a number": {"rope_parameters": 3},
        "an unknown kind of rope": {"rope_parameters": {"rope_type": "x", "rope_theta": "y"}},
        "eos_token_id is a word": {"eos_token_id": "x"},
        "no heads": {"num_attention_heads": 0},
        "heads of a negative number": {"num_attention_heads": -3},
        "hidden_size 10^18": {"hidden_size": 10**18},
        "hidden_size 10^400": {"hidden_size": 10**400},
        "hidden_size is null": {"hidden_size": None},
        "vocab_size -1": {"vocab_size": -1},
        "vocab_size is a list": {"vocab_size": [2048]},
        "10^9 blocks": {"num_hidden_layers": 10**9},
        "no blocks": {"num_hidden_layers": 0},
        "max_position_embeddings is a word": {"max_position_embeddings": "x"},
        "max_position_embeddings 10^12": {"max_position_embeddings": 10**12},
        "an unknown dtype": {"dtype": "nope"},
        "dtype is an attribute": {"dtype": "nn"},
        "an unknown hidden_act": {"hidden_act": "os.system"},
        "rms_norm_eps is a word": {"rms_norm_eps": "x"},
        "architectures is a number": {"architectures": 3},
        "architectures of numbers": {"architectures": [3]},
        "model_type is a number": {"model_type": 3},
        "model_type is an encoder": {"model_type": "bert"},
        "quantization_config is a number": {"quantization_config": 3},
        "quantization_config is empty": {"quantization_config": {}},
        "an unknown quantisation": {"quantization_config": {"quant_method": "x"}},
        "tie_word_embeddings is a word": {"tie_word_embeddings": "x"},
        "pad_token_id out of range": {"pad_token_id": 10**9},
        "layer_types of three": {"layer_types": ["full_attention"] * 3},
        "auto_map": {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}, "model_type": "own"},
        "auto_map is a number": {"auto_map": 3},
        "10^9 labels": {"num_labels": 10**9},
        "sub_configs is a number": {"sub_configs": 3},
    }
    # Without all of what it says about layers, C could not be read for another reason.
    fine = {
        "tie_word_embeddings is a word",
        "10^9 blocks",
        "pad_token_id out of range",
        "max_position_embeddings 10^12",
        "eos_token_id is a word",
        "quantization_config is empty",
        "auto_map is a number",
        "architectures of numbers",
        "architectures is a number",
        "layer_types of three",
        "rms_norm_eps is a word",
        "dtype is an attribute",
        "an unknown dtype",
        "sub_configs is a number",
        "max_position_embeddings is a word",
    }
    for number, (what, fields) in enumerate(values.items()):
        commands = READERS if number < 4 else [READERS[(number + step) % len(READERS)] for step in range(0, 8, 3)]
        exits = WORKS_OR_NOT if what in fine or "inspect" in commands or "report" in commands else EITHER
        yield Fault(kind, f"config.json: {what}", usual(*commands), config(**fields), exits=exits)
    contents: dict[str, tuple[str, str]] = {
        "tokenizer.json is {}": ("tokenizer.json", "{}"),
        "tokenizer.json is a list": ("tokenizer.json", "[]"),
        "tokenizer.json is null": ("tokenizer.json", "null"),
        "tokenizer.json is empty": ("tokenizer.json", ""),
        "tokenizer_config.json is a number": ("tokenizer_config.json", "3"),
        "tokenizer_config.json names an unknown class": ("tokenizer_config.json", '{"tokenizer_class": "Nope"}'),
        "tokenizer_config.json has code": (
            "tokenizer_config.json",
            '{"auto_map": {"AutoTokenizer": ["own.T", null]}, "tokenizer_class": "T"}',
        ),
        "generation_config.json is a list": ("generation_config.json", "[]"),
        "num_beams 0": ("generation_config.json", '{"num_beams": 0}'),
        "num_beams 10^9": ("generation_config.json", '{"num_beams": 1000000000}'),
        "a temperature that is a word": ("generation_config.json", '{"temperature": "x", "do_sample": true}'),
        "an eos that is a word": ("generation_config.json", '{"eos_token_id": "x"}'),
        "an unknown cache": ("generation_config.json", '{"cache_implementation": "x"}'),
        "num_return_sequences": ("generation_config.json", '{"num_return_sequences": 100000000}'),
        "a watermark": ("generation_config.json", '{"watermarking_config": 3}'),
        "config.json is a list": ("config.json", "[]"),
        "config.json is null": ("config.json", "null"),
        "config.json is empty": ("config.json", ""),
        "config.json is cut": ("config.json", '{"model_type": "lla'),
        "config.json is no UTF-8": ("config.json", '{"model_type": "\udcff"}'),
        "config.json 100,000 deep": ("config.json", "[" * 100_000),
        "config.json with a number of 5,000 digits": ("config.json", '{"hidden_size": ' + "9" * 5000 + "}"),
    }
    for what, (name, text) in contents.items():
        commands = LOADERS if not name.startswith("config") else ("compress", "inspect", "generate", "report")
        commands = [command for command in commands if command != "report"] if name.startswith("gen") else commands
        exits = EITHER if name in ("tokenizer.json", "config.json") else WORKS_OR_NOT
        damage = file(f"{{model}}/{name}", text.encode("utf-8", "surrogateescape"))
        yield Fault(kind, what, usual(*commands), damage, exits=exits)
    dropout = edited("{model}/tokenizer.json", lambda content: content["model"].update(dropout=5))
    yield Fault(
        kind,
        "a tokenizer that drops five of one",
        usual("compress", "evaluate", "generate"),
        dropout,
        exits=WORKS_OR_NOT,
    )
    ids = edited(
        "{model}/tokenizer.json",
        lambda content: content["model"]["vocab"].update({"Ġthe": 10**6, "hi": 10**6 + 1, "h": 10**6 + 2}),
    )
    yield Fault(
        kind,
        "a tokenizer with ids past the vocabulary",
        usual("compress", "evaluate", "generate", "chat"),
        ids,
        exits=WORKS_OR_NOT,
    )
    many = edited(
        "{model}/tokenizer.json",
        lambda content: content["added_tokens"].append({**content["added_tokens"][0], "id": 9**18}),
    )
    yield Fault(kind, "a token of id 9^18", usual("evaluate", "generate"), many, exits=WORKS_OR_NOT)
    tokenizers: dict[str, dict[str, Any]] = {
        "cuts words of no letters": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "cuts for ever": {"pre_tokenizer": split("(([a-z ]+)+)+[0-9]$")},
        "has a map that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "replaces nothing": {"normalizer": replaces({"String": ""}, "x")},
        "replaces a letter by 5 MB": {"normalizer": replaces({"Regex": "."}, "x" * 5_000_000)},
        "replaces replacements": {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [replaces({"String": old}, new * 1000) for old, new in ("ab", "bc", "cd", "de")],
            }
        },
        "decodes to 5 MB": {"decoder": replaces({"Regex": "."}, "x" * 5_000_000)},
        "adds a billion tokens": {"post_processor": adds(30_000, 100_000)},
        "adds an unknown token": {"post_processor": {**adds(1, 1), "special_tokens": {}}},
        "knows no word": {"model": {"type": "WordLevel", "unk_token": "nope", "vocab": {"a": 1}}},
        "knows no letter": {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}},
    }
    for what, fields in tokenizers.items():
        damage = with_fields("{model}/tokenizer.json", **fields)
        lines = usual("compress", "evaluate", "generate", "chat")
        yield Fault(kind, f"a tokenizer that {what}", lines, damage, exits=WORKS_OR_NOT)
    for what, fields in {
        "model_max_length is a word": {"model_max_length": "x"},
        "tokenizer_class is of another kind": {"tokenizer_class": "AutoConfig"},
    }.items():
        damage = with_fields("{model}/tokenizer_config.json", **fields)
        yield Fault(kind, f"tokenizer_config.json: {what}", usual("compress", "generate"), damage, exits=WORKS_OR_NOT)
    templates = {
        "multiplies a letter": "{{ 'a' * 10**10 }}",
        "does not end": "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
        "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "doubles a text": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "pads a text": "{{ 'a' | center(10**11) }}",
        "raises to a power": "{{ 3 ** (10 ** 9) }}",
        "writes 20 MB": "{{ 'a ' * 10**7 }}",
        "is wrong": "{% if %}",
        "reads attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "divides by zero": "{{ 1 // 0 }}",
        "raises": "{{ raise_exception('\\u001b]0;x\\u0007') }}",
        "speaks control characters": "{{ '\\u001b]0;x\\u0007' }}{{ messages[0]['content'] }}",
        "says nothing": "",
        "calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    }
    for what, template in templates.items():
        yield Fault(
            kind,
            f"a chat template that {what}",
            usual("chat"),
            with_fields("{model}/tokenizer_config.json", chat_template=template),
            exits=WORKS_OR_NOT,
        )
    yield Fault(
        kind,
        "a chat template that is a number",
        usual("chat"),
        with_fields("{model}/tokenizer_config.json", chat_template=3),
        exits=WORKS_OR_NOT,
    )


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replaces(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def adds(tokens: int, times: int) -> dict[str, Any]:
    """What a tokenizer puts before a text: so many tokens, so many times."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "q", "type_id": 0}}] * times + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {"q": {"id": "q", "ids": [0] * tokens, "tokens": ["a"] * tokens}},
    }


def checkpoints() -> Iterator[Fault]:
    kind = "damaged checkpoints"
    everyone = usual("compress", "evaluate", "generate", "export", "report", "inspect")
    damages = {
        "a file cut in half": raw_weights(lambda data: data[: len(data) // 2]),
        "an empty file": raw_weights(lambda data: b""),
        "a header of 2^60 bytes": raw_weights(lambda data: (2**60).to_bytes(8, "little") + data[8:]),
        "a header of 90 MB that is not there": raw_weights(lambda data: (90_000_000).to_bytes(8, "little") + data[8:]),
        "a header that is no JSON": raw_weights(lambda data: data[:8] + b"x" + data[9:]),
        "a header that is a list": raw_weights(lambda data: (2).to_bytes(8, "little") + b"[]"),
        "a header 100,000 deep": raw_weights(lambda data: (10**5).to_bytes(8, "little") + b"[" * 10**5),
        "a shape of 10^18": shaped([10**18, 192]),
        "a negative shape": shaped([-1, 192]),
        "a shape without numbers": shaped([]),
        "a flat shape": shaped([2048 * 192]),
        "offsets past the end": weights(
            lambda header, rest: (
                {
                    name: {**entry, "data_offsets": [10**15, 10**15 + 4]} if name != "__metadata__" else entry
                    for name, entry in header.items()
                },
                rest,
            )
        ),
        "an unknown dtype": weights(
            lambda header, rest: (
                {name: {**entry, "dtype": "Q7"} if name != "__metadata__" else entry for name, entry in header.items()},
                rest,
            )
        ),
        "complex numbers": weights(
            lambda header, rest: (
                {
                    name: {
                        **entry,
                        "dtype": "C64",
                        "shape": [(entry["data_offsets"][1] - entry["data_offsets"][0]) // 8],
                    }
                    if name != "__metadata__"
                    else entry
                    for name, entry in header.items()
                },
                rest,
            )
        ),
        "no tensors": weights(lambda header, rest: ({}, b"")),
        "a text file": raw_weights(lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
        "bytes at the end": raw_weights(lambda data: data + bytes(100)),
    }
    for number, (what, damage) in enumerate(damages.items()):
        lines = (
            everyone
            if number < 4
            else {c: everyone[c] for c in [[*everyone][(number + step) % 6] for step in (0, 2, 3)]}
        )
        yield Fault(kind, what, lines, damage, exits=EITHER if number not in (8, 9, 10, 12, 13) else WORKS_OR_NOT)
    loading = usual("evaluate", "generate", "export", "inspect", "report")
    at = f"C/{INDEX}"
    indices: dict[str, Any] = {
        "metadata is null": lambda content: content.update(metadata=None),
        "metadata is a word": lambda content: content.update(metadata="x"),
        "weight_map is a list": lambda content: content.update(weight_map=[]),
        "weight_map is empty": lambda content: content.update(weight_map={}),
        "a file outside": lambda content: content["weight_map"].update({"x": "../t.txt"}),
        "a file of 5,000 letters": lambda content: content["weight_map"].update({"x": "y" * 5000}),
        "a file that is a number": lambda content: content["weight_map"].update({"x": 7}),
        "a file that is null": lambda content: content["weight_map"].update({"x": None}),
        "a file with a NUL": lambda content: content["weight_map"].update({"x": "a\0b"}),
        "a file that is a folder": lambda content: content["weight_map"].update({"x": "."}),
        "a surrogate": lambda content: content["weight_map"].update({"x": "\ud800"}),
    }
    for number, (what, edit) in enumerate(indices.items()):
        lines = (
            loading
            if number in (0, 5)
            else {c: loading[c] for c in [[*loading][(number + step) % 5] for step in (0, 2)]}
        )
        yield Fault(
            kind, f"an index: {what}", lines, edited(at, edit), exits=WORKS_OR_NOT if "metadata" in what else EITHER
        )
    outside = all_of(
        copied("C/model-00002-of-00005.safetensors", "stolen"), link("C/model-00002-of-00005.safetensors", "../stolen")
    )
    yield Fault(kind, "a link out of the folder", usual("generate", "export"), outside, exits=WORKS_OR_NOT)
    missing = gone("C/model-00003-of-00005.safetensors")
    yield Fault(kind, "a missing file", loading, missing)
    records: dict[str, Any] = {
        "is {}": lambda content: {"x": 1},
        "has layers that are a number": lambda content: content.update(layers=3),
        "has layers of nulls": lambda content: content.update(layers=[None]),
        "has negative sizes": lambda content: content.update(stored_bytes=-1, dense_parameters=0),
        "has an infinite error": lambda content: content["layers"][0].update(relative_error=float("inf")),
        "has a recipe that is a word": lambda content: content.update(recipe="x"),
        "has numbers of 400 digits": lambda content: content["layers"][0].update(rank=10**400, relative_error=10**400),
        "has a name that is null": lambda content: content["layers"][0].update(name=None),
    }
    for what, edit in records.items():
        yield Fault(
            kind,
            f"compression.json {what}",
            usual("inspect", "report", "export"),
            edited("C/compression.json", edit),
            exits=WORKS_OR_NOT,
        )

    def quantisation(**fields: Any) -> Any:
        return lambda content: content["quantization_config"].update(fields)

    layers: dict[str, Any] = {
        "has no layers": quantisation(layers={}),
        "has layers that are a list": quantisation(layers=[]),
        "has layers that are null": quantisation(layers=None),
        "has another format": quantisation(format=99, version="x"),
        "has layers of numbers": lambda content: content["quantization_config"].update(
            layers=dict.fromkeys(content["quantization_config"].get("layers", {}), 3)
        ),
        "has ranks of 10^12": ranks(10**12),
        "has ranks of -1": ranks(-1),
        "has ranks that are words": ranks("x"),
    }
    for what, edit in layers.items():
        yield Fault(
            kind,
            f"config.json of C {what}",
            usual("inspect", "generate", "export"),
            edited("C/config.json", edit),
            exits=WORKS_OR_NOT,
        )


def ranks(value: Any) -> Any:
    def edit(content: dict[str, Any]) -> None:
        for entry in content["quantization_config"].get("layers", {}).values():
            entry["rank"] = value

    return edit


def not_finite() -> Iterator[Fault]:
    kind = "NaN in tensors that are copied"
    for value, number in (("NaN", b"\xc0\x7f"), ("infinity", b"\x80\x7f")):
        for name in ("embed_tokens", "model.norm", "input_layernorm"):
            yield Fault(kind, f"{value} in {name}", usual("compress"), filled(name, number), says=name)
            yield Fault(kind, f"{value} in {name}", usual("evaluate"), filled(name, number), says="NaN|finite")
    yield Fault(
        kind,
        "NaN in factors",
        usual("export", "report", "evaluate"),
        filled("low_rank_u", b"\xc0\x7f"),
        exits=WORKS_OR_NOT,
    )
    yield Fault(kind, "NaN in S", usual("evaluate"), filled("down_proj", b"\xc0\x7f"), says="NaN|finite|damaged")
    yield Fault(
        kind, "NaN in a layer", usual("compress"), filled("layers.1.mlp.down_proj", b"\xc0\x7f"), says="down_proj"
    )


def depths() -> Iterator[Fault]:
    kind = "JSON of another shape"
    contents = {
        "100,000 deep": "[" * 100_000,
        "100,000 deep in objects": '{"a":' * 100_000,
        "a number of 5,000 digits": '{"seconds": ' + "9" * 5000 + "}",
        "a list": "[]",
        "a null": "null",
        "a string": '"x"',
        "nothing": "",
        "no UTF-8": b"\xff\xfe",
        "NaN": '{"model": NaN}',
        "a NUL": "{\0}",
        "twice the same name": '{"model": "a", "model": 3}',
        "nulls": '{"model": null, "perplexity": null, "tasks": null}',
        "other types": '{"model": 3, "perplexity": [], "tasks": 7}',
        "a surrogate": '{"model": "\\ud800", "perplexity": {"\\udfff": {"perplexity": 1.0, "tokens": 1, "window": 1}}}',
        "an infinite loss": '{"model": "m", "perplexity": {"t": {"perplexity": 1e999, "tokens": 1, "window": 1}}}',
        "a negative perplexity": '{"model": "m", "perplexity": {"t": {"perplexity": -5, "tokens": -1, "window": 0}}}',
    }
    for what, content in contents.items():
        for name, lines, exits in (
            ("results", {"report": "report C x.json -q"}, EITHER),
            ("C.seconds.json", usual("report"), WORKS_OR_NOT),
            ("C/evaluation.json", usual("report"), WORKS_OR_NOT),
            ("C/compression.json", usual("inspect", "export"), WORKS_OR_NOT),
        ):
            yield Fault(
                kind, f"{name}: {what}", lines, file("x.json" if name == "results" else name, content), exits=exits
            )
