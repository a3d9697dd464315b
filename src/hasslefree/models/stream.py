"""The residual stream in other coordinates: which weights read and write it, and how a rotation changes them.

An RMS norm without gains commutes with a rotation Q of the stream. So a model whose stream is h Q in the place of h
predicts the same where every matrix that reads the stream is W diag(g) Q, with the gains g of the norm before it, which
become one, and every matrix that writes it is QᵀW (Ashkboos et al., arXiv 2401.15024). The same holds for the values
of an attention head, between the matrix that computes them and the one that reads the head's output.

Nothing here is specific to a family of models: the structure is observed on one segment, and a random rotation tests
whether a block's output stays the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.core.gram import working_dtype
from hasslefree.errors import ModelError
from hasslefree.models.calls import BlockCall, hooks
from hasslefree.models.logits import logits_of
from hasslefree.models.sites import Site, find_sites
from hasslefree.models.streaming import Change, changed
from hasslefree.models.walk import Walk

# The tolerance of a block's output in float32, relative to what the block adds, for the median token.
ALIKE = 1e-4


@dataclass(frozen=True)
class Norm:
    """An RMS norm over the stream. gain: of each channel; unit: the weight that makes every gain one. (width,) each."""

    gain: Tensor
    unit: Tensor


@dataclass(frozen=True)
class StreamUse:
    """How a part of a model uses the residual stream.

    Args:
        norms: those whose outputs are read, by name. reads: the norm that each reading site reads, by the site's name.
        writes: the names of the sites whose outputs are added to the stream.
    """

    norms: Mapping[str, Norm]
    reads: Mapping[str, str]
    writes: tuple[str, ...] = ()

    def changes(self, root: nn.Module, rotation: Tensor) -> dict[str, Change]:
        """By the name of each parameter under root. rotation: Q, (width, width)."""
        names, sites = parameter_names(root), find_sites(root)
        found: dict[str, Change] = {}
        for name, norm in self.reads.items():
            reading = partial(read_rotated, self.norms[norm].gain, rotation)
            found[names[id(sites[name].parameter)]] = matrix_change(sites[name], reading)
        for name in self.writes:
            found[names[id(sites[name].parameter)]] = matrix_change(sites[name], partial(torch.matmul, rotation.T))
            if sites[name].bias is not None:
                found[names[id(sites[name].module.bias)]] = partial(torch.matmul, rotation.T)
        for name, each in self.norms.items():
            [weight] = root.get_submodule(name).parameters()
            found[names[id(weight)]] = partial(replaced_by, each.unit)
        return found


def read_rotated(gain: Tensor, rotation: Tensor, weight: Tensor) -> Tensor:
    """The matrix that reads a rotated stream, normed without gains, as `weight` (out, width) reads it with them."""
    return (weight * gain) @ rotation


def replaced_by(other: Tensor, weight: Tensor) -> Tensor:
    """Another tensor in the place of a weight."""
    return other


@dataclass(frozen=True)
class HeadUse:
    """The heads of an attention. values, output: the sites that compute the values, and that read the heads' outputs.

    Args:
        size: channels of a head. count: of key heads; each has its own values.
    """

    values: str
    output: str
    size: int
    count: int = field(compare=False)

    def changes(self, root: nn.Module, rotations: Tensor) -> dict[str, Change]:
        """By the name of each parameter under root. rotations: of the values of each key head, (count, size, size)."""
        names, sites = parameter_names(root), find_sites(root)
        values, output = sites[self.values], sites[self.output]
        repeated = rotations.repeat_interleave(output.shape[1] // self.size // self.count, dim=0)
        found = {
            names[id(values.parameter)]: matrix_change(values, lambda w: turned(w.T, rotations).T),
            names[id(output.parameter)]: matrix_change(output, lambda w: turned(w, repeated)),
        }
        if values.bias is not None:
            found[names[id(values.module.bias)]] = lambda bias: turned(bias[None], rotations)[0]
        return found


def turned(rows: Tensor, rotations: Tensor) -> Tensor:
    """Rows (…, heads·size) with the channels of each head rotated. rotations: (heads, size, size)."""
    heads = rows.unflatten(-1, rotations.shape[:2])
    return torch.einsum("...hi,hij->...hj", heads, rotations).flatten(-2)


def matrix_change(site: Site, change: Change) -> Change:
    """The change of a stored parameter that applies `change` to its matrix (out, in)."""
    return (lambda stored: change(stored.T).T) if site.transposed else change


def one_after_the_other(*changes: Mapping[str, Change]) -> dict[str, Change]:
    """All of these changes; several for the same parameter are applied in order."""
    found: dict[str, Change] = {}
    for each in changes:
        for name, change in each.items():
            before = found.get(name)
            found[name] = change if before is None else partial(in_turn, before, change)
    return found


def in_turn(first: Change, second: Change, weight: Tensor) -> Tensor:
    """A weight after the first and then the second change."""
    return second(first(weight))


def apply(root: nn.Module, changes: Mapping[str, Change]) -> None:
    """Change parameters under root in place."""
    for name, change in changes.items():
        changed(root.get_parameter(name), change)


def parameter_names(root: nn.Module) -> dict[int, str]:
    """By `id`."""
    return {id(parameter): name for name, parameter in root.named_parameters()}


def random_rotation(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Orthogonal matrices (…, size, size), in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q.to(like)


def norm_of(module: nn.Module, width: int) -> Norm | None:
    """The gains of an RMS norm over `width` channels; None for every other module."""
    own = list(module.parameters())
    if len(own) != 1 or own[0].shape != (width,):
        return None
    # Large, so that the epsilon that is added to the mean square is negligible.
    ones = own[0].new_full((1, width), 1e4, dtype=working_dtype(own[0]))
    x = ones * torch.linspace(-1, 2, width, device=ones.device)
    trial = copy.deepcopy(module).to(ones.dtype)
    [weight] = trial.parameters()
    with torch.no_grad():
        try:
            gain = trial(ones)[0]
            normed, found = x / x.square().mean().sqrt(), trial(x)
            weight.add_(1 - gain)
            alone = trial(x)
        except Exception:  # no module that is called with hidden states alone, whatever it says then
            return None
    if not torch.allclose(found, normed * gain, atol=1e-3) or not torch.allclose(alone, normed, atol=1e-3):
        return None
    return Norm(gain, weight.detach().clone())


def stream_use(block: nn.Module, call: BlockCall, states: Tensor) -> StreamUse:
    """How a block uses the stream. states: what enters it, (1, tokens, width), in the working dtype.

    Raises:
        ModelError: its output changes with a rotation of the stream.
    """
    if call.extra is not None or call.shape:
        raise ModelError("the block takes more inputs than one tensor of hidden states")
    trial, width = copy.deepcopy(block).to(states.dtype), states.shape[-1]
    norms = {name: norm for name, module in trial.named_modules() if (norm := norm_of(module, width)) is not None}
    reads = readers(trial, list(norms), lambda: call.run(trial, states))
    if not reads:
        raise ModelError(
            "no linear layer takes its input from an RMSNorm of the residual stream (LayerNorm cannot be rotated)"
        )
    sites = find_sites(trial)
    writes = tuple(name for name, site in sites.items() if site.shape[0] == width and name not in reads)
    found = StreamUse({name: norms[name] for name in dict.fromkeys(reads.values())}, reads, writes)
    rotation = random_rotation((width, width), states)
    if not difference(trial, call, states, found.changes(trial, rotation), rotation) <= ALIKE:
        raise ModelError(
            "the residual stream is used by more than RMSNorm and linear layers, for example by a norm after a layer, "
            "experts, a convolution, or a scaling of its channels"
        )
    return found


def readers(root: nn.Module, norms: list[str], run: Callable[[], object]) -> dict[str, str]:
    """The norm that a site reads, by the site's name, for each site under root that reads one of these."""
    outputs: dict[tuple[int, int], tuple[str, Tensor]] = {}
    found: dict[str, str] = {}

    def normed(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: object, output: Tensor) -> None:
            outputs[output.data_ptr(), output.numel()] = name, output  # held, so that no other gets its place

        return see

    def read(name: str) -> Callable[[Tensor], None]:
        def see(x: Tensor) -> None:
            if held := outputs.get((x.data_ptr(), x.numel())):
                found[name] = held[0]

        return see

    handles = [root.get_submodule(name).register_forward_hook(normed(name)) for name in norms]
    handles += [site.on_input(read(name)) for name, site in find_sites(root).items()]
    with hooks(handles), torch.no_grad():
        run()
    return found


def difference(
    trial: nn.Module, call: BlockCall, states: Tensor, changes: Mapping[str, Change], rotation: Tensor | None = None
) -> float:
    """The median relative change of what a block adds, with changed parameters, which it then keeps.

    Args:
        rotation: of the stream; None where it stays as it is.
    """
    there = torch.eye(states.shape[-1]).to(states) if rotation is None else rotation
    with torch.no_grad():
        before = call.run(trial, states)
        apply(trial, changes)
        after = call.run(trial, states @ there) @ there.T
    off = (after - before).norm(dim=-1) / (before - states).norm(dim=-1)
    return off.median().item()


def head_use(block: nn.Module, call: BlockCall, states: Tensor, known: HeadUse | None = None) -> HeadUse:
    """The heads of a block's attention. states: as for `stream_use`. known: of another block, which is tried first.

    Raises:
        ModelError: the values of the heads do not pass directly from one linear layer to another.
    """

    def off(heads: HeadUse) -> float:
        rotations = random_rotation((heads.count, heads.size, heads.size), states)
        trial = copy.deepcopy(block).to(states.dtype)
        return difference(trial, call, states, heads.changes(trial, rotations))

    candidates = head_candidates(block)
    if known in candidates and known is not None and off(known) <= ALIKE:
        return known
    # Rotated keys make little difference where attention is all but even.
    found = min(((off(heads), index) for index, heads in enumerate(candidates)), default=(math.inf, 0))
    if not found[0] <= ALIKE:
        raise ModelError(
            "the attention computes queries, keys and values with one matrix, or changes the outputs of the heads"
        )
    return candidates[found[1]]


def head_candidates(block: nn.Module) -> list[HeadUse]:
    """Pairs of sites of one module with heads, whose sides go together."""
    found, sites = [], find_sites(block)
    for path, module in block.named_modules():
        size = getattr(module, "head_dim", None)
        inside = {n: site.shape for n, site in sites.items() if n.rpartition(".")[0] == path}
        if not isinstance(size, int) or not inside:
            continue
        for output, (_, read) in inside.items():
            for values, (made, _) in inside.items():
                if values != output and made % size == 0 and read % made == 0:
                    found.append(HeadUse(values, output, size, made // size))
    return found


def tied(model: PreTrainedModel) -> str | None:
    """Why the residual stream of a model with tied weights cannot be rotated; None for a model without."""
    if not model.all_tied_weights_keys:
        return None
    return "the output head is tied to the embeddings, so the gains of the last norm cannot go into the head alone"


def outer_use(walk: Walk, segment: Tensor, entering: Tensor, leaving: Tensor) -> tuple[StreamUse, str]:
    """How embeddings and output head use the stream; and the name of the embeddings' parameter.

    Args:
        segment: (tokens,). entering, leaving: what enters the first block for it, and what leaves the last one,
            (1, tokens, width).

    Raises:
        ModelError: they cannot absorb a rotation.
    """
    model, width = walk.model, entering.shape[-1]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError("the embeddings or the output head are not one plain matrix (nn.Embedding, nn.Linear)")
    with walk.outside():
        first = embedding(segment[None]).to(entering.dtype)
        scale = (first * entering).sum() / first.square().sum()
        if not (entering - scale * first).norm() <= 0.05 * entering.norm():
            raise ModelError("the first block gets more than the token embeddings, for example position embeddings")
        norms = {n: each for m in walk.outer() if (n := names[id(m)]) and (each := norm_of(m, width)) is not None}
        states = leaving.to(head.weight.dtype)
        reads = readers(model, list(norms), lambda: logits_of(model, walk.blocks, walk.calls, segment, states))
        reads = {name: norm for name, norm in reads.items() if name == names[id(head)]}
        if not reads:
            raise ModelError("the output head does not follow an RMSNorm after the last block")
        known = {embedding, head, *(model.get_submodule(norm) for norm in reads.values())}
        for module in walk.outer():
            for name, parameter in module.named_parameters(recurse=False):
                if module not in known and width in parameter.shape:
                    raise ModelError(
                        f"{names[id(module)]}.{name}, outside the blocks, may also use the residual stream"
                    )
    return StreamUse({norm: norms[norm] for norm in reads.values()}, reads), f"{names[id(embedding)]}.weight"
