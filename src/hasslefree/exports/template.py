"""Read a dense model from a GGUF file, and find the tensors of a compressed model in it.

This works for any architecture. A converter renames all tensors and may permute the rows of
matrices, as llama.cpp's does for rotary embeddings, so matrices and the order of their rows are
found by their values. The file holds the dense weight W of each layer, and S + u v is nearer to its
own W than to any other matrix.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.errors import ModelError, option

# Tensors by name.
Tensors = dict[str, Tensor]
# The types of tensors that are not quantised, with their dtypes.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Two matrices may be the same if the sums of their rows have at least this cosine. For unrelated
# matrices it is about 0.
LIKE = 0.5
# Two rows match if their squared distance is at most this share of the template's squared norm. A
# trained vector matches if its distance is at most this share of the norm.
NEAR = 0.5
# The least share of rows that match if the rows of two matrices are mutually nearest.
MOST = 0.9
# Rows that differ by less than this share of their norm are equal up to rounding.
ROUNDING = 2**-7
# The number of rows that are compared with all others at a time.
CHUNK = 1024


@dataclass(frozen=True)
class Template:
    """An open GGUF file.

    Args:
        path: the file.
        reader: the GGUFReader of the package gguf.
        tensors: the tensors of the reader, by name.
        dense: the folder of the dense model, if the file was converted for this export.
    """

    path: Path
    reader: Any
    tensors: Mapping[str, Any]
    dense: Path | None

    def shape(self, name: str) -> tuple[int, ...]:
        """(out, in) for a matrix."""
        return tuple(self.tensors[name].shape[::-1].tolist())

    def dtype(self, name: str) -> torch.dtype:
        return PLAIN[self.tensors[name].tensor_type.name]

    def values(self, name: str) -> Tensor:
        """A tensor in float32, in its `shape`."""
        content = bytearray(self.tensors[name].data)
        return torch.frombuffer(content, dtype=self.dtype(name)).float().view(self.shape(name))

    def holds(
        self,
        name: str,
        ours: Tensor,
        shift: int = 0,
    ) -> bool:
        """Return True if a tensor equals ours plus a number, up to rounding to either dtype."""
        theirs = self.values(name)
        rounded = (ours.float() + shift).to(self.dtype(name)).float()
        return torch.equal(rounded, theirs) or torch.equal((theirs - shift).to(ours.dtype), ours)

    def error(self, problem: str) -> ModelError:
        if self.dense is None:
            return template_error(self.path, problem)
        return ModelError(
            f"the dense model {self.dense} {problem}; if it has changed since, give the one that"
            f" was compressed as a GGUF file with {option('template')}"
        )


def template_error(path: Path, problem: str) -> ModelError:
    return ModelError(
        f"the template {path} {problem}; make the template with llama.cpp's convert_hf_to_gguf.py,"
        " --outtype bf16, from the dense model that was compressed"
    )


def check_package() -> None:
    """Raise a ModelError if the package gguf is not installed."""
    if importlib.util.find_spec("gguf") is None:
        remedy = 'pip install "hasslefree[gguf]"'
        raise ModelError(
            f"{option('to', 'gguf')} needs the package gguf, which is not installed: {remedy}"
        )


def read_template(path: Path, dense: Path | None = None) -> Template:
    """Open a template.

    Args:
        path: the file.
        dense: the folder of the model that was converted, if any.

    Raises:
        ModelError: the file is missing, not a GGUF file, quantised, or in several parts.
    """
    from gguf import GGUFReader

    try:
        if not path.is_file():  # reading a pipe would block
            raise ValueError("it is no regular file")
        reader = GGUFReader(path)
        parts = reader.get_field("split.count")
        count = int(parts.contents()) if parts else 1
    except Exception as error:  # the reader may raise anything
        raise template_error(path, f"cannot be read as a GGUF file ({error})") from None
    if count > 1:
        raise template_error(path, "is one of several parts")
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in PLAIN:
            problem = f"is quantised already: {tensor.name} has the type {kind}"
            raise template_error(path, problem)
    return Template(path, reader, {tensor.name: tensor for tensor in reader.tensors}, dense)


@dataclass(frozen=True)
class Place:
    """A matrix in the template. rows: for each of its rows, the index of our row, (out,)."""

    name: str
    rows: Tensor


# The places of matrices, by our names of these.
Places = dict[str, Place]


def find_matrices(
    template: Template, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], Tensor]
) -> Places:
    """Find our matrices in the template.

    Args:
        shapes: the shape (out, in) of each matrix, by name.
        values: returns the matrix of a name.

    Raises:
        ModelError: the place of a matrix is not clear.
    """
    places: Places = {}
    for shape in dict.fromkeys(shapes.values()):
        ours = [name for name in shapes if shapes[name] == shape]
        theirs = [name for name in template.tensors if template.shape(name) == shape]
        if len(theirs) < len(ours):
            raise template.error(
                f"has {len(theirs)} matrices of {shape[0]}×{shape[1]}, and the model has"
                f" {len(ours)}, such as {ours[0]}"
            )
        our_sums = torch.stack([values(name).float().sum(0) for name in ours])
        their_sums = torch.stack([template.values(name).sum(0) for name in theirs])
        likeness = F.normalize(our_sums, dim=1) @ F.normalize(their_sums, dim=1).T
        for index, name in enumerate(ours):
            best = int(likeness[index].argmax())
            if likeness[index, best] < LIKE or int(likeness[:, best].argmax()) != index:
                raise template.error(f"is of another model: none of its matrices is clearly {name}")
            rows = row_order(values(name).float(), template.values(theirs[best]))
            if rows is None:
                raise template.error(
                    f"is of another model: {theirs[best]} has other values than {name}"
                )
            places[name] = Place(theirs[best], rows)
    return places


def row_order(ours: Tensor, theirs: Tensor) -> Tensor | None:
    """Match the rows of two matrices (out, in) by nearest values. Returns `Place.rows`, or None if
    the order is not clear.
    """
    same = torch.arange(len(ours))
    if in_place(ours, theirs).all():
        return same
    nearest = nearest_rows(theirs, ours)
    back = nearest_rows(ours, theirs)
    is_mutual = torch.equal(back[nearest], same)
    # With two bits, the distance of single rows may exceed `NEAR`.
    share = in_place(ours[nearest], theirs).float().mean()
    if is_mutual and share > MOST:
        return nearest
    return None


def in_place(ours: Tensor, theirs: Tensor) -> Tensor:
    """A mask of the rows of ours that match the same row of theirs: (rows,) bool. A row of zeros
    matches a row that is almost zero.
    """
    energy = theirs.square().sum(1)
    distance = (ours - theirs).square().sum(1)
    return distance <= NEAR * energy + ROUNDING**2 * energy.mean()


def nearest_rows(rows: Tensor, among: Tensor) -> Tensor:
    """For each row of the first matrix, the index of the nearest row of the second."""
    half = among.square().sum(1) / 2
    return torch.cat([(chunk @ among.T - half).argmax(1) for chunk in rows.split(CHUNK)])


def find_vector(
    template: Template,
    name: str,
    begin: str,
    ours: Tensor,
    trained: bool,
) -> Tensors:
    """Find a vector in the template.

    Args:
        begin: the beginning of the tensor's name in the template.
        trained: the vector may differ a little from the dense model's.

    Returns:
        The new values in float32 by the name of the tensor; empty if they are unchanged.

    Raises:
        ModelError: no tensor clearly is this vector.
    """
    found: list[tuple[float, str, Tensor]] = []
    for theirs, tensor in template.tensors.items():
        if tensor.n_elements != ours.numel() or not theirs.startswith(begin):
            continue
        values = template.values(theirs)
        vector = ours.view_as(values)
        for shift in (0, 1):  # the converter adds 1 to the gains of Gemma
            moved = vector.float() + shift
            distance = 0.0
            if not template.holds(theirs, vector, shift):
                distance = float((moved - values).norm() / values.norm().clamp_min(1e-30))
            found.append((distance, theirs, moved))
    found.sort(key=lambda each: each[0])
    most = NEAR if trained else 0.0
    nearest = found[0][0] if found else math.inf
    if nearest > most or (len(found) > 1 and found[1][0] < 2 * nearest):
        raise template.error(f"is of another model: none of its tensors is clearly {name}")
    _, theirs, moved = found[0]
    if nearest:
        return {theirs: moved}
    return {}
