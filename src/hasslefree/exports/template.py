"""A dense model in a GGUF file: what it holds, and where in it the tensors of a compressed model are.

No architecture is known here. A converter may permute the rows of a matrix, as llama.cpp's does for rotary embeddings,
and it renames everything: matrices and the order of their rows are found by their values. The file has the dense
weight W of each layer, and S + u v, which approximates it, is nearer to its own W than to any other matrix.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasslefree.errors import ModelError, option

REMEDY = 'pip install "hasslefree[gguf]"'
# Types of tensors in a file that is not quantised, with their dtypes.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Sums over rows that have at least this cosine may belong to the same matrix; unrelated ones have about 0.
LIKE = 0.5
# A row is in its place if its squared distance from the row there is at most this share of that row's squares.
NEAR = 0.5
# Entries that differ by less than this share of the largest are alike, but for rounding.
ROUNDING = 2**-7
# Rows that are compared with all others at once.
CHUNK = 1024


@dataclass(frozen=True)
class Template:
    """An open GGUF file. tensors: the reader's, by name."""

    path: Path
    reader: Any
    tensors: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """(out, in) of a matrix."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def values(self, name: str) -> Tensor:
        """A tensor in float32, in the shape above."""
        tensor = self.tensors[name]
        flat = torch.frombuffer(bytearray(tensor.data.tobytes()), dtype=PLAIN[tensor.tensor_type.name])
        return flat.float().view(self.shape(name))

    def error(self, problem: str) -> ModelError:
        return ModelError(
            f"the template {self.path} {problem}; make the template with llama.cpp's convert_hf_to_gguf.py, "
            "--outtype bf16, from the dense model that was compressed"
        )


def read_template(path: str | Path | None) -> Template:
    """Open a template. Raises a ModelError if it is none: missing, not a GGUF file, quantised, or in parts."""
    if path is None:
        raise ModelError(
            f"{option('to', 'gguf')} needs {option('template')}, a GGUF file of the dense model, as llama.cpp's "
            "convert_hf_to_gguf.py with --outtype bf16 writes it"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{option('to', 'gguf')} needs the package gguf, which is not installed: {REMEDY}")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Template(Path(path), None, {}).error(f"cannot be read as a GGUF file ({error})") from None
    template = Template(Path(path), reader, {tensor.name: tensor for tensor in reader.tensors})
    if "general.architecture" not in reader.fields or not template.tensors:
        raise template.error("holds no model")
    if (parts := reader.get_field("split.count")) and parts.contents() > 1:
        raise template.error("is one of several parts")
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in PLAIN:
            raise template.error(f"is quantised already: {tensor.name} has the type {tensor.tensor_type.name}")
    return template


@dataclass(frozen=True)
class Matrix:
    """A matrix of ours. shape: (out, in). values: gives it, in any dtype."""

    shape: tuple[int, int]
    values: Callable[[], Tensor]


@dataclass(frozen=True)
class Vector:
    """A vector of ours, such as a norm's gains. begin: of its name in the template. values: float32."""

    name: str
    begin: str
    values: Tensor


@dataclass(frozen=True)
class Place:
    """A matrix in the template. rows: (out,), the row of ours that is each row there; None for the same order."""

    name: str
    rows: Tensor | None

    def ordered(self, tensor: Tensor) -> Tensor:
        """Rows of ours in the order of the template."""
        return tensor if self.rows is None else tensor[self.rows]


def find_matrices(template: Template, matrices: Mapping[str, Matrix]) -> dict[str, Place]:
    """Where each matrix is in the template. Raises a ModelError if that is not clear of one of them."""
    places: dict[str, Place] = {}
    for shape in dict.fromkeys(matrix.shape for matrix in matrices.values()):
        ours = [name for name, matrix in matrices.items() if matrix.shape == shape]
        theirs = [name for name in template.tensors if template.shape(name) == shape]
        if len(theirs) < len(ours):
            raise template.error(
                f"has {len(theirs)} matrices of {shape[0]}×{shape[1]}, and the model has {len(ours)}, such as {ours[0]}"
            )
        sums = [matrices[name].values().float().sum(0) for name in ours]
        likeness = cosines(sums, [template.values(name).sum(0) for name in theirs])
        for index, name in enumerate(ours):
            best = int(likeness[index].argmax())
            if likeness[index, best] < LIKE or int(likeness[:, best].argmax()) != index:
                raise template.error(f"is of another model: none of its matrices is clearly {name}")
            rows = row_order(matrices[name].values().float(), template.values(theirs[best]))
            if rows is False:
                raise template.error(f"is of another model: {theirs[best]} has other values than {name}")
            places[name] = Place(theirs[best], rows)
    return places


def cosines(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """The cosine of each vector of the first list with each of the second: (ours, theirs)."""
    first, second = (torch.nn.functional.normalize(torch.stack(vectors), dim=1) for vectors in (ours, theirs))
    return first @ second.T


def row_order(ours: Tensor, theirs: Tensor) -> Any:
    """The rows of ours (out, in) that are those of theirs, as `Place` has them; False if that is not clear.

    If the order differs, each row must be the nearest of the other's nearest row.
    """
    if in_place(ours, theirs):
        return None
    nearest, back = nearest_rows(theirs, ours), nearest_rows(ours, theirs)
    mutual = torch.equal(back[nearest], torch.arange(len(ours)))
    return nearest if mutual and in_place(ours[nearest], theirs) else False


def in_place(ours: Tensor, theirs: Tensor) -> bool:
    """Whether each row of ours is near the same row of theirs. A row of zeros is near what is almost zero."""
    energy = theirs.square().sum(1)
    return bool(((ours - theirs).square().sum(1) <= NEAR * energy + ROUNDING**2 * energy.mean()).all())


def nearest_rows(rows: Tensor, among: Tensor) -> Tensor:
    """For each row of the first matrix, the index of the nearest row of the second."""
    half = among.square().sum(1) / 2
    return torch.cat([(chunk @ among.T - half).argmax(1) for chunk in rows.split(CHUNK)])


def find_vectors(template: Template, vectors: Sequence[Vector], trained: bool) -> dict[str, Tensor]:
    """The values, by their name in the template, of the vectors that are not equal to the template's.

    Args:
        trained: whether the compression may have changed them; otherwise they must be alike but for rounding.
    """
    changed: dict[str, Tensor] = {}
    for vector in vectors:
        found = []
        for theirs, tensor in template.tensors.items():
            if tensor.n_elements == vector.values.numel() and theirs.startswith(vector.begin):
                values = template.values(theirs)
                for shift in (0, 1):  # the converter adds 1 to the gains of Gemma
                    moved = vector.values.view(values.shape) + shift
                    found.append((float((moved - values).norm() / values.norm().clamp_min(1e-30)), theirs, moved))
        found.sort(key=lambda each: each[0])
        if found and found[0][0] == 0:
            continue
        near = found and found[0][0] <= (NEAR if trained else ROUNDING)
        if not near or (len(found) > 1 and found[1][0] < 2 * found[0][0]) or found[0][1] in changed:
            raise template.error(f"is of another model: none of its tensors is clearly {vector.name}")
        changed[found[0][1]] = found[0][2]
    return changed
