"""The fields of a recipe: each is declared once, with its type, limits, default, help and heading.

The command line, YAML files, the documentation and the record of a compression follow from the
declarations. This module imports nothing heavy: `hasslefree --help` starts at once.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, ConfigDict

from hasslefree.texts.shares import MIXED, as_texts
from hasslefree.validation import Dtype

# The headings of the help, in its order.
BUDGET = "What to compress to"
METHOD = "Method"
GRID = "Quantisation"
TEXT = "Calibration"
LEVERS = "Training and allocation"
GROUPS = (BUDGET, METHOD, GRID, TEXT, LEVERS)

Allocate = Literal["uniform", "owl", "error"]
CONFIG = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


def declared(default: Any, group: str, **options: Any) -> Any:
    """A field. options: limits of pydantic, such as ge=0, and `flags` other than --name and
    --no-name.
    """
    return dataclasses.field(default=default, metadata={"group": group, **options})


def as_size(given: Any) -> Any:
    """The field `size` as text; a number of bytes may be given as a number."""
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return str(given) if is_number else given


def as_patterns(given: Any) -> Any:
    """The field `leave_dense` as a tuple; one pattern may be given as text."""
    return (given,) if isinstance(given, str) else given


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=CONFIG)
class Fields:
    """The fields of a `Recipe`. The text below a field is its help on the command line and in the
    documentation.
    """

    size: Annotated[str | None, BeforeValidator(as_size)] = declared(None, BUDGET)
    """Size to reach: bytes of all weights (such as 1.5GB), or bits for each weight of the
    compressed layers (4.8bits); bits, and ranks with fixed codes, are then chosen layer by layer,
    except those that are given (default: 5.2bits, if nothing else says what to compress to, and no
    method is named)."""
    pattern: str | None = declared(None, BUDGET)
    """Which entries of S may be non-zero: N:M (such as 2:4), unstructured, row, structured (whole
    input channels) or dense (default: 2:4; dense for methods with a grid)."""
    rank: int | None = declared(None, BUDGET, ge=0, le=10**9)
    """Rank of L; 0 for S alone (default: 0 for joint-grid with bits and pattern dense; otherwise
    give a rank, a ratio or a size)."""
    sparsity: float | None = declared(None, BUDGET, ge=0, le=1)
    """Share of zeros in S, for the patterns unstructured, row and structured (no default)."""
    ratio: float | None = declared(None, BUDGET, ge=0, le=1)
    """Share of the parameters to remove from each layer; it determines the rank (no default)."""
    rank_share: float | None = declared(None, BUDGET, ge=0, le=1)
    """Share of the kept parameters that L gets; needed with a ratio and a pattern other than N:M
    (no default).
    """
    method: str | None = declared(None, METHOD)
    """How to decompose each layer; `hasslefree methods` lists the methods (default: joint-grid for
    a grid, and for a size or an engine unless the pattern prunes; otherwise joint)."""
    effort: Literal["fast", "balanced", "best"] | None = declared(None, LEVERS)
    """Work besides decomposing single layers: fast (nothing), balanced (train the kept
    values of all layers; for a sparse S with L, also move rank between layers) or best (train
    longer, and move rank and bits between layers) (default: balanced for joint and joint-grid, fast
    for other methods)."""
    allocate: Allocate | None = declared(None, LEVERS)
    """Share of each layer in the bits, the rank and the non-zeros: uniform (the same for every
    layer), error (more for layers whose errors hurt predictions most) or owl (a higher ratio or
    sparsity for blocks with fewer outliers) (default: error for a size, else the effort's)."""
    pruner: str | None = declared(None, METHOD)
    """Pruner of an alternating method such as hassle-free; `hasslefree methods` lists the pruners
    (default: the method's)."""
    low_rank: str | None = declared(None, METHOD)
    """Low-rank solver of an alternating method such as hassle-free; `hasslefree methods` lists the
    solvers (default: the method's)."""
    rounds: int | None = declared(None, METHOD, ge=1, le=10**6)
    """Iterations of the method: more take longer and fit better (default: the effort's for joint,
    and the method's own otherwise)."""
    damping: float | None = declared(None, METHOD, ge=0, allow_inf_nan=False)
    """Ridge on the diagonal of H, the second moment of a layer's inputs, as a multiple of its mean
    (default: the method's)."""
    refit: bool = declared(False, METHOD)
    """After pruning, fit the kept entries again by least squares."""
    engine: Literal["transformers", "llama.cpp", "mlx", "vllm"] | None = declared(None, GRID)
    """Program that is to run the result: the grid becomes one that it holds exactly, and bits,
    group_size, symmetric and offset get its defaults; transformers stands for torch's int4
    operators, and llama.cpp with a size for its own types, such as Q4_K, without L (no
    default)."""
    bits: int | None = declared(None, GRID)
    """Bits of an entry of S: 2, 3, 4, 5, 6 or 8, for methods with a grid, with entropy coding on
    average; bits that are given are those of every layer (default: 4, and by layer for a size)."""
    group_size: int | None = declared(None, GRID, ge=0)
    """Consecutive inputs that share a scale; 0 for a whole row (default: 32 with scales of few bits
    and for llama.cpp, otherwise 64; none with entropy coding)."""
    symmetric: bool | None = declared(None, GRID, flags=("--symmetric/--asymmetric",))
    """A grid that is symmetric around zero, or one from the smallest to the largest entry (default:
    asymmetric with fixed codes)."""
    offset: bool | None = declared(None, GRID)
    """The smallest value of a group as a number of the model's dtype, instead of a whole zero point
    of few bits; for pattern dense (default: on for joint-grid with pattern dense and fixed codes,
    unless symmetric; otherwise off)."""
    scale_bits: int | None = declared(None, GRID)
    """Bits of the scales and offsets: 3, 4, 5, 6 or 8, as multiples of a number of their row, so
    that small groups take few bytes; 16 for floats (default: 5 for joint-grid with pattern dense
    and fixed codes, unless the engine needs floats; otherwise 16)."""
    coding: Literal["fixed", "entropy"] | None = declared(None, GRID)
    """How the file stores the codes of a grid: fixed (all with the same bits) or entropy (frequent
    codes in fewer bits, with a scale for each row and each input: a smaller file at the same loss,
    but a byte for each weight in memory; for transformers) (default: entropy for a size of up to
    7.5 bits per weight with joint-grid and pattern dense, unless an engine, a rank, embeddings of 8
    bits or another part of the grid is given; otherwise fixed)."""
    factor_bits: int | None = declared(None, GRID)
    """8 to store both factors of L as int8 (default: 8 for joint with a size, otherwise the
    model's dtype)."""
    embedding_bits: int | None = declared(None, GRID)
    """Bits of the input embedding and of the output head: 2, 3, 4, 5, 6 or 8 (default: chosen for a
    size, if the layers are on a grid; otherwise they stay dense)."""
    calibration: Annotated[str | tuple[str, ...], BeforeValidator(as_texts)] = declared(MIXED, TEXT)
    """Text on which the layers are fitted: mixed for all kinds, c4, wikitext2, ptb, wikipedia,
    code, chat, languages, a .txt or .jsonl file, python for Python's standard library, or self for
    text that the model writes itself, which both need no network and no file; or several with
    shares, such as 'c4:60% python:40%'."""
    first_token: bool = declared(True, TEXT)
    """Begin every segment with what the tokenizer puts before a text, such as <bos>; SparseGPT's
    code, and the paper's, do not."""
    samples: int = declared(128, TEXT, ge=1, le=10**9)
    """Number of calibration segments."""
    seqlen: int | None = declared(None, TEXT, ge=2, le=10**9)
    """Tokens in a segment (default: 2048, or the model's limit if that is less)."""
    sequential: Literal["layer", "block"] = declared("layer", TEXT)
    """When the inputs of layers are collected again: layer (after each group of layers; slower,
    better) or block (once per block)."""
    match_predictions: int | None = declared(None, LEVERS, ge=0, le=10**12)
    """Tokens of new calibration text on which what the layers store (values of S or scales of its
    grid, and L) is trained until the model predicts what the dense one does; 0 for none (default:
    the effort's)."""
    minutes: float | None = declared(None, LEVERS, gt=0, le=10**6)
    """Time for the whole run: fine-tuning reads its text again until the time is over, so the
    result depends on the speed of the machine (no default: fine-tuning reads its text once, a short
    one at most three times; with minutes, the effort is best)."""
    check: bool = declared(True, TEXT)
    """Measure the perplexity before and after, on text that was held out."""
    leave_dense: Annotated[tuple[str, ...], BeforeValidator(as_patterns)] = declared(
        (), BUDGET, strict=False
    )
    """Globs over names of layers or parameters that stay as they are, such as '*.0.*' (default:
    none).
    """
    dtype: Dtype = declared("auto", BUDGET)
    """Dtype of the compressed model: auto (the checkpoint's), float32, bfloat16 or float16."""
    seed: int = declared(0, TEXT, ge=0, lt=2**63)
    """Seed of all random numbers."""


NAMES = tuple(field.name for field in dataclasses.fields(Fields))


def help_of(name: str) -> str:
    """The help of a field, in one line."""
    return " ".join(Fields.__pydantic_fields__[name].description.split())  # type: ignore[attr-defined]
