"""Kinds of wrong input: settings, texts, paths, numbers, types and surroundings."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from harness.hostile.damage import (
    ESCAPE,
    INDEX,
    all_of,
    fifo,
    file,
    folder,
    link,
    renamed_everywhere,
    sparse,
)
from harness.hostile.fault import (
    EITHER,
    LOADERS,
    PYTHON,
    READERS,
    TYPED_WRONG,
    USUAL,
    WORKS,
    WORKS_OR_NOT,
    During,
    Fault,
    at_once,
    usual,
)


def threads() -> Iterator[Fault]:
    kind = "numbers of threads and devices"
    for number in ("5000", "31000", "100000", "2147483648", "9" * 31, "0", "-1", "nan", "2.5", ESCAPE):
        line = usual("generate", "chat", more=f"--threads '{number}'")
        yield Fault(kind, f"--threads {number!r:.12}", line, exits=TYPED_WRONG)
    for device in ("cuda:99", "cpu:7", "meta", "nope", "", ESCAPE, "x" * 3000):
        line = usual("generate", "evaluate", "compress", "plan", more=f"--device '{device}'")
        yield Fault(kind, f"--device {device!r:.12}", line, exits=WORKS_OR_NOT if device in ("cpu:7", "") else EITHER)
    yield Fault(kind, "--backend", usual("generate", more="--backend nope"), exits=TYPED_WRONG)


def settings() -> Iterator[Fault]:
    kind = "files of settings without end"
    read = {
        "config.json": READERS,
        "compression.json": ("inspect", "report"),
        "tokenizer.json": LOADERS,
        "tokenizer_config.json": LOADERS,
        "generation_config.json": LOADERS,
        INDEX: LOADERS,
    }
    for name, commands in read.items():
        at = f"{{model}}/{name}"
        some = commands if name == "config.json" else commands[:2]
        lines = usual(*some)
        exits = EITHER if name == "config.json" else WORKS_OR_NOT  # the command may do without
        yield Fault(kind, f"{name} is /dev/zero", lines, link(at, "/dev/zero"), exits=exits)
        yield Fault(kind, f"{name} is a pipe", lines, fifo(at), exits=exits)
        yield Fault(kind, f"{name} of 3 GB", usual(*some[-1:]), sparse(at, 3 * 2**30), exits=exits)
    others = {
        "a recipe": ("r", {"plan": f"{USUAL['plan']} --recipe r", "compress": f"{USUAL['compress']} --recipe r"}),
        "a text": (
            "x.txt",
            {
                "compress": USUAL["compress"].replace("t.txt", "x.txt"),
                "evaluate": USUAL["evaluate"].replace("t.txt", "x.txt"),
            },
        ),
        "results": ("x.json", {"report": "report C x.json -q"}),
        "evaluation.json": ("C/evaluation.json", usual("report")),
        "seconds": ("C.seconds.json", usual("report")),
    }
    for what, (at, lines) in others.items():
        for which, damage in (
            ("a pipe", fifo(at)),
            ("/dev/zero", link(at, "/dev/zero")),
            ("3 GB", sparse(at, 3 * 2**30)),
            ("a folder", folder(at)),
        ):
            if what == "a text" and which in ("3 GB",):
                continue
            yield Fault(kind, f"{what}: {which}", lines, damage, exits=WORKS_OR_NOT if what == "seconds" else EITHER)
    recipe = {"plan": f"{USUAL['plan']} --recipe b0.yaml", "compress": f"{USUAL['compress']} --recipe b0.yaml"}

    def chain(root: Path, model: str) -> None:
        for number in range(1500):
            (root / f"b{number}.yaml").write_text(f"base: b{number + 1}.yaml\n")
        (root / "b1500.yaml").write_text("seed: 1\n")

    yield Fault(kind, "1,500 recipes on each other", recipe, chain, exits=WORKS_OR_NOT)
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    yield Fault(kind, "a recipe of aliases", recipe, file("b0.yaml", bomb), exits=TYPED_WRONG)
    yield Fault(kind, "a recipe that holds itself", recipe, file("b0.yaml", "damping: &a [*a]\n"), exits=TYPED_WRONG)
    merged = "a: &a {x: 1}\n" + "".join(f"b{n}: &b{n}\n  <<: [*a, *a]\n" for n in range(3))
    yield Fault(kind, "a recipe of merges", recipe, file("b0.yaml", merged), exits=TYPED_WRONG)
    for mark in ("[", "{", "- ", "? "):
        yield Fault(
            kind, f"a recipe 50,000 deep in {mark!r}", recipe, file("b0.yaml", mark * 50_000), exits=TYPED_WRONG
        )
    yield Fault(
        kind, "a recipe of 30 MB", recipe, file("b0.yaml", lambda: "# comment\n" * 3_000_000), exits=WORKS_OR_NOT
    )
    for what, content in {
        "no UTF-8": b"damping: \xff",
        "a NUL": b"damping: \0",
        "UTF-16": "damping: 2".encode("utf-16"),
        "an escape sequence": f'"{ESCAPE}": 1'.encode(),
        "escaped ones": b'"\\e]0;x\\a": 1',
        "infinity": b"damping: .inf",
        "NaN": b"damping: .nan",
        "nulls": b"rank: null\nsamples: null",
        "a date": b"damping: 2020-01-01",
        "binary": b"damping: !!binary AAAA",
        "a number of 5,000 digits": b"damping: " + b"9" * 5000,
        "a list": b"[1, 2]",
        "two documents": b"a: 1\n---\nb: 2\n",
        "a list as name": b"[1]: 2\n",
        "a mapping as name": b"{a: 1}: 2\n",
        "octal": b"damping: 0o17",
    }.items():
        exits = WORKS_OR_NOT if what == "nulls" else TYPED_WRONG
        yield Fault(kind, f"a recipe with {what}", recipe, file("b0.yaml", content), exits=exits)


def texts() -> Iterator[Fault]:
    kind = "texts without end"
    one = {
        "compress": USUAL["compress"].replace("t.txt", "big.txt"),
        "evaluate": USUAL["evaluate"].replace("t.txt", "big.txt"),
        "plan": USUAL["plan"].replace("t.txt", "big.txt").replace("--rank 2", "--size 5bits"),
    }
    lines = {command: line.replace("big.txt", "big.jsonl") for command, line in one.items()}
    yield Fault(kind, "100 MB of one letter", one, file("big.txt", lambda: "x" * 10**8), exits=WORKS_OR_NOT)
    yield Fault(
        kind, "40 MB of spaces and a word", one, file("big.txt", lambda: " " * 4 * 10**7 + "word"), exits=WORKS_OR_NOT
    )
    yield Fault(kind, "40 MB of line feeds", one, file("big.txt", lambda: "x" + "\n" * 4 * 10**7), exits=WORKS_OR_NOT)
    yield Fault(
        kind, "20 MB of emoji", one, file("big.txt", lambda: "\N{WOMAN}\u200d" * (3 * 10**6)), exits=WORKS_OR_NOT
    )
    yield Fault(
        kind,
        "one line of 40 MB",
        lines,
        file("big.jsonl", lambda: '{"text": "' + "x" * 4 * 10**7 + '"}'),
        exits=WORKS_OR_NOT,
    )
    yield Fault(
        kind,
        "a million short lines",
        {"compress": lines["compress"]},
        file("big.jsonl", lambda: '{"text": "a b c"}\n' * 10**6),
    )
    yield Fault(kind, "a line 100,000 deep", lines, file("big.jsonl", "[" * 100_000), exits=EITHER)
    yield Fault(
        kind, "a number of 5,000 digits", lines, file("big.jsonl", '{"text": ' + "9" * 5000 + "}"), exits=EITHER
    )
    yield Fault(kind, "a surrogate", lines, file("big.jsonl", '{"text": "\\ud800"}'), exits=EITHER)
    yield Fault(kind, "NULs", one, file("big.txt", "\0" * 10_000), exits=WORKS_OR_NOT)
    yield Fault(kind, "UTF-16", one, file("big.txt", ("words " * 1000).encode("utf-16")), exits=EITHER)
    yield Fault(
        kind, "a prompt of 10 MB", {"generate": "generate C --dense none --max-new-tokens 2"}, stdin=b"x" * 10**7
    )
    yield Fault(kind, "a line of 10 MB", usual("chat"), stdin=b"x" * 10**7 + b"\n", exits=WORKS_OR_NOT)
    yield Fault(kind, "no prompt", {"generate": "generate C --dense none"}, exits=TYPED_WRONG)
    yield Fault(
        kind,
        "no UTF-8 in the prompt",
        {"generate": "generate C --dense none --max-new-tokens 2"},
        stdin=b"\xff\xfe hi",
        exits=WORKS,
    )


def paths() -> Iterator[Fault]:
    kind = "paths"
    loop, long, parent = link("loop", "loop"), "x" * 5000, "t.txt/sub"
    for what, name in {
        "a loop": "loop",
        "in a loop": "loop/x",
        "5,000 letters": long,
        "below a file": parent,
        "no name": "",
        "no folder above": "no/such/x",
        "a folder": "M",
        "/proc/nope": "/proc/nope",
        "no UTF-8": "\udcff\udcfe",
    }.items():
        quoted = f"'{name}'"
        maybe = WORKS_OR_NOT if what in ("no UTF-8", "no folder above") else EITHER
        yield Fault(
            kind,
            f"--output: {what}",
            usual("inspect", "plan", "evaluate", more=f"--output {quoted}")
            | {"report": f"report C -q --output {quoted}"},
            loop,
            exits=maybe,
        )
        yield Fault(
            kind,
            f"OUT: {what}",
            {"compress": USUAL["compress"].replace("OUT", quoted), "export": f"export C {quoted} --to dense -q"},
            loop,
            exits=maybe,
        )
        models = {
            command: line.replace(" C", f" {quoted}", 1).replace(" M", f" {quoted}", 1)
            for command, line in USUAL.items()
            if command in READERS
        }
        yield Fault(kind, f"the model: {what}", models, loop, exits=EITHER if name != "M" else WORKS_OR_NOT)
        yield Fault(
            kind,
            f"--recipe: {what}",
            usual("plan", more=f"--recipe {quoted}"),
            loop,
            exits=TYPED_WRONG if name else WORKS_OR_NOT,
        )
        yield Fault(
            kind,
            f"a text: {what}",
            {
                "evaluate": USUAL["evaluate"].replace("t.txt", quoted),
                "compress": USUAL["compress"].replace("t.txt", quoted),
            },
            loop,
            exits=EITHER,
        )
        yield Fault(kind, f"--figures: {what}", usual("report", more=f"--figures {quoted}"), loop, exits=WORKS_OR_NOT)
        yield (
            Fault(kind, f"the demo's folder: {what}", {"demo": f"demo --rounds 1 -q --out {quoted}"}, loop)
            if what not in ("a folder", "no folder above", "no UTF-8", "no name")
            else Fault(
                kind,
                f"--dense: {what}",
                {"generate": f"generate C hi --max-new-tokens 2 --dense {quoted}"},
                loop,
                exits=WORKS_OR_NOT,
            )
        )
    read_only = {
        "compress": USUAL["compress"].replace("OUT", "/proc/OUT"),
        "export": "export C /proc/E --to dense -q",
        "report": "report C -q --output /proc/page.html",
        "evaluate": USUAL["evaluate"] + " --output /proc/x.json",
    }
    yield Fault(kind, "a place that cannot be written", read_only)
    yield Fault(
        kind,
        "the current folder is gone",
        usual("inspect", "plan"),
        during=During(at_once, lambda root, pid: None),
        exits=WORKS,
    )
    yield Fault(kind, "a template that is no GGUF", {"export": "export C E --to gguf --template t.txt -q"})
    yield Fault(kind, "a template without end", {"export": "export C E --to gguf --template /dev/zero -q"})
    yield Fault(kind, "a template that is a pipe", {"export": "export C E --to gguf --template f -q"}, fifo("f"))
    count = struct.pack("<4sIQQQ11sIQ1s", b"GGUF", 3, 0, 1, 11, b"split.count", 8, 1, b"x")
    gguf = {"export": "export C E --to gguf --template t.gguf -q"}
    yield Fault(kind, "a template of x parts", gguf, file("t.gguf", count))
    for what, content in {"raises": "1 / 0", "exits": "raise SystemExit(3)", "is no Python": "(("}.items():
        yield Fault(kind, f"a package that {what}", {"run": "run a.b"}, file("a/__init__.py", content))
    yield Fault(
        kind,
        "data of tasks that is a pipe",
        {"evaluate": "evaluate C --tasks piqa --task-data d -q"},
        all_of(file("d/x"), fifo("d/piqa.jsonl")),
    )
    yield Fault(
        kind,
        "a cache that is a file",
        {"evaluate": "evaluate C --tasks piqa --task-data d --cache t.txt -q --limit 1"},
        file("d/piqa.jsonl", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n'),
        exits=WORKS_OR_NOT,
    )


def numbers() -> Iterator[Fault]:
    kind = "numbers out of range"
    huge, digits = "9" * 25, "9" * 400
    plans = [
        "--ratio inf",
        "--ratio nan",
        "--ratio 1e400",
        f"--ratio {digits}",
        "--ratio -1",
        f"--rank {huge}",
        "--rank -1",
        "--rank nan",
        "--rank 1.5",
        f"--processes {huge}",
        "--processes 9223372036854775807",
        "--processes 0",
        f"--samples {huge}",
        f"--seqlen {huge}",
        "--samples 0",
        "--seqlen -1",
        "--damping nan",
        "--damping inf",
        "--damping -1",
        f"--rounds {huge}",
        "--sparsity 2",
        "--sparsity nan",
        "--pattern 999999999999:9999999999999",
        "--pattern 0:0",
        "--pattern -1:4",
        "--pattern 2:4:8",
        f"--pattern {digits}:{digits}",
        f"--bits {huge}",
        "--bits 0",
        "--bits nan",
        f"--group-size {huge} --bits 4",
        f"--size {digits}GB",
        "--size -1GB",
        "--size nanGB",
        "--size 0bits",
        f"--size {digits}bits",
        "--size 1e400bits",
        "--size ٣bits",
        "--rank-share inf",
        "--rank-share nan",
        f"--seed {huge}",
        f"--seed -{huge}",
        f"--match-predictions {huge}",
        "--rank ٣",
        "--rank 1_000_000_000_000",
        "--rank 0x10",
        "--block 99999999999999999999",
    ]
    for words in plans:
        line = (
            USUAL["plan"].replace("--rank 2 ", "")
            + (
                " --rank 2 "
                if not words.startswith(("--rank ", "--ratio", "--size", "--rank-share", "--bits"))
                else " "
            )
            + words
        )
        exits = (
            WORKS_OR_NOT
            if words.startswith(
                (
                    "--seed",
                    "--rounds",
                    "--samples",
                    "--seqlen",
                    "--rank ٣",
                    "--rank 1_",
                    "--size ٣",
                    "--match",
                    "--processes 9223",
                    "--group-size",
                )
            )
            or words.startswith("--processes 999")
            else TYPED_WRONG
        )
        yield Fault(kind, f"{words:.30}", {"plan": line}, exits=exits)
    compresses = [
        f"--seed -{huge}",
        f"--rounds {huge}",
        f"--match-predictions {huge}",
        f"--samples {huge}",
        f"--seqlen {huge}",
        f"--rank {huge}",
        "--damping 1e400",
        "--activations nope",
        f"--effort {ESCAPE!r}",
        "--seqlen 1000000000000",
        "--samples 1000000000000",
    ]
    for words in compresses:
        yield Fault(kind, f"{words:.30}", usual("compress", more=words), exits=EITHER)
    slices = [
        f"t.jsonl[0:{digits}]",
        "t.jsonl[-5:]",
        "t.jsonl[5:2]",
        f"t.jsonl[{huge}:]",
        "t.jsonl[x:]",
        "t.jsonl[",
        "t.jsonl[0:0]",
    ]
    for name in slices:
        lines = {
            "compress": USUAL["compress"].replace("t.txt", f"'{name}'"),
            "evaluate": USUAL["evaluate"].replace("t.txt", f"'{name}'"),
        }
        yield Fault(
            kind,
            f"{name:.30}",
            lines,
            file("t.jsonl", '{"text": "' + "some words " * 200 + '"}\n' * 1),
            exits=WORKS_OR_NOT,
        )
    generates = [
        f"--seed -{huge}",
        f"--seed {huge}",
        f"--seed {digits}",
        "--temperature nan",
        "--temperature inf",
        "--temperature 1e-320",
        "--temperature 1e308",
        "--temperature -0.0",
        f"--max-new-tokens {huge}",
        f"--max-new-tokens {digits}",
        "--max-new-tokens 0",
    ]
    for words in generates:
        line = {
            command: USUAL[command].replace("--max-new-tokens 2", "" if "tokens" in words else "--max-new-tokens 2")
            + f" {words}"
            for command in ("generate", "chat")
        }
        exits = TYPED_WRONG if any(word in words for word in ("nan", "inf", "tokens 0")) else WORKS_OR_NOT
        yield Fault(kind, f"{words:.30}", line, exits=exits)
    for words in (f"{digits}GB", "0GB", "-1GB", "nanGB", "1e9GB", "0.0000001KB", "x", "", "٣GB", "1 GB"):
        exits = TYPED_WRONG if words not in ("0.0000001KB", "٣GB", "1 GB", f"{digits}GB") else WORKS_OR_NOT
        yield Fault(
            kind, f"--max-shard-size {words:.12}", usual("export", more=f"--max-shard-size '{words}'"), exits=exits
        )
    evaluates = [
        f"--seqlen {huge}",
        "--seqlen 1",
        f"--max-tokens {huge}",
        "--max-tokens 1",
        "--batch-size 0",
        f"--batch-size {digits}",
        f"--batch-size {huge}",
        "--batch-size ²",
        "--batch-size nan",
        "--batch-size -1",
        f"--limit {huge}",
        "--limit 0",
        "--dtype int4",
        "--dtype float64",
    ]
    for words in evaluates:
        exits = WORKS_OR_NOT if words.startswith(("--max-tokens 9", "--batch-size 9", "--limit 9")) else EITHER
        yield Fault(kind, f"{words:.30}", usual("evaluate", more=words), exits=exits)
    for words in (f"--max-new-tokens {huge}", "--max-new-tokens 0", "--prompt ''"):
        yield Fault(kind, f"{words:.30}", usual("report", more=f"--prompt hi --dense none {words}"), exits=WORKS_OR_NOT)
    for word in ("²", "9" * 5000, "٣"):
        named = renamed_everywhere("layers.0", f"layers.{word}")
        yield Fault(kind, f"block {word:.6}", usual("inspect", "report", "generate"), named, exits=WORKS_OR_NOT)
    for words in (f"--rounds {huge}", f"--rounds {digits}", "--rounds 0", "--rounds nan"):
        yield Fault(kind, f"{words:.30}", {"demo": f"demo --out D -q {words}"}, exits=TYPED_WRONG)


def library() -> Iterator[Fault]:
    kind = "types from Python"
    pieces = [
        "Recipe(rank=2.5)",
        "Recipe(damping='x')",
        "Recipe(rank='2')",
        "Recipe(samples=None)",
        "Recipe(seed=True)",
        "Recipe(rank=-1)",
        "Recipe(pattern=24)",
        "Recipe(pattern=None, rank=[2])",
        "Recipe(leave_dense='*q_proj')",
        "Recipe(leave_dense=3)",
        "Recipe(leave_dense=(1,))",
        "Recipe(method=3)",
        "Recipe(size=5)",
        "Recipe(size=float('nan'))",
        "Recipe(ratio=float('inf'))",
        "Recipe(ratio=10**400)",
        "Recipe(calibration=3)",
        "Recipe(seqlen=numpy.float32(8))",
        "Recipe(damping=torch.tensor(float('nan')))",
        "compress(3, 'OUT')",
        "compress('M', None)",
        "compress('M', 3)",
        "compress('M', 'OUT', {'rank': 2})",
        "compress('M', 'OUT', 'recipe')",
        "compress(None, 'OUT')",
        "compress('M', 'OUT', R, segments='abc')",
        "compress('M', 'OUT', R, segments=torch.zeros(2, 8))",
        "compress('M', 'OUT', R, segments=torch.full((2, 8), 10**6))",
        "compress('M', 'OUT', R, segments=torch.full((2, 8), -1))",
        "compress('M', 'OUT', R, segments=torch.zeros(0, 8, dtype=torch.long))",
        "compress('M', 'OUT', R, device=3)",
        "compress('M', 'OUT', R, activations=3)",
        "compress('M', 'OUT\\0', R)",
        "compress('M\\0', 'OUT', R)",
        "export('C', 'E', 3)",
        "export(None, 'E')",
        "export('C', None)",
        "export('C', 'E', max_shard_size=5)",
        "export('C', 'E', max_shard_size=None)",
        "export('C', 'E\\0')",
        "export('C', 'E', template=3)",
        "decompose(W, G, rank=1.9)",
        "decompose(W, G, rank='2')",
        "decompose(W, G, rank=-1)",
        "decompose(W, G, rank=10**30)",
        "decompose(W, G, pattern=3)",
        "decompose(W, G, pattern='2:0')",
        "decompose('W', G, rank=1)",
        "decompose(W[0], G, rank=1)",
        "decompose(W.long(), G, rank=1)",
        "decompose(W * float('nan'), G, rank=1)",
        "decompose(W[:, :4], G, rank=1)",
        "decompose(W.to('meta'), G, rank=1)",
        "decompose(W[:0], G, rank=1)",
        "decompose(W + 1j, G, rank=1)",
        "Gram.from_activations(None)",
        "Gram.from_activations([[1.0]])",
        "Gram.from_activations(torch.zeros(0, 8))",
        "Gram.from_activations(torch.zeros(3))",
        "Gram.from_activations(X * float('inf'))",
        "Gram.from_activations(X.long())",
        "use_backend(None, 'dense')",
        "use_backend(torch.nn.Linear(2, 2), 3)",
        "perplexity(None, torch.zeros(1, 8, dtype=torch.long))",
        "perplexity(None, None)",
        "advise('M', 3)",
        "advise(3, R)",
    ]
    start = (
        "import numpy, torch\nfrom hasslefree import Gram, Recipe, advise, compress, decompose\n"
        "from hasslefree import export, perplexity, use_backend\n"
        "torch.manual_seed(0)\nX, W = torch.randn(50, 8), torch.randn(4, 8)\nG = Gram.from_activations(X)\n"
        "R = Recipe(method='eora', rank=2, samples=2, seqlen=32, calibration='t.txt')\n"
    )
    for piece in pieces:
        yield Fault(
            kind, piece, {PYTHON: start + piece}, exits=WORKS | TYPED_WRONG if "long()" in piece else TYPED_WRONG
        )
    for piece in (
        "compress('M', 'OUT', Recipe(method='eora', rank=numpy.int64(2), samples=2, seqlen=32, calibration='t.txt'))",
        "compress('M', 'OUT', Recipe(method='eora', rank=2.0, samples=2, seqlen=32, calibration='t.txt'))",
    ):
        yield Fault(kind, piece, {PYTHON: start + piece}, exits=WORKS | TYPED_WRONG)


def surroundings() -> Iterator[Fault]:
    kind = "surroundings"
    light, heavy = usual("methods", "inspect"), usual("plan")
    for what, environment, lines, exits in (
        ("an ASCII terminal", {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, light, WORKS),
        ("the locale C", {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, light, WORKS),
        ("a terminal of -5 columns", {"COLUMNS": "-5"}, light, WORKS),
        ("a terminal of no columns", {"COLUMNS": "0", "LINES": "0"}, light, WORKS),
        ("COLUMNS is a word", {"COLUMNS": "x"}, light, WORKS),
        ("an unknown TERM", {"TERM": "nope", "FORCE_COLOR": ""}, light, WORKS),
        ("no HOME", {"HOME": "/proc/nonexistent"}, light | heavy, WORKS),
        ("WORLD_SIZE without RANK", {"WORLD_SIZE": "2"}, usual("compress"), EITHER),
        ("RANK is a word", {"RANK": "x"}, light | usual("compress"), WORKS_OR_NOT),
        ("RANK beyond WORLD_SIZE", {"RANK": "7", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, usual("compress"), EITHER),
        ("WORLD_SIZE is a word", {"WORLD_SIZE": "x", "RANK": "0"}, usual("compress"), EITHER),
        ("no folder for temporary files", {"TMPDIR": "/proc/nonexistent"}, light | heavy, WORKS),
        ("RANK=1 alone", {"RANK": "1"}, heavy, WORKS_OR_NOT),
    ):
        yield Fault(
            kind, what, lines, environment=environment, exits=exits, says="MB" if what == "RANK=1 alone" else ""
        )
