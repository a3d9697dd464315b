"""Mixtures of experts: the fused weights of a block's experts, split into a linear layer for each
matrix.

transformers keeps all experts of a block in a few tensors (experts, …), whose layout one interface
describes (`integrations.moe.use_experts_implementation`). Once split, an expert's matrices are
linear layers like all others, calibrated and trained on the tokens routed to the expert.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.models.calls import replaced

# The attributes by which `use_experts_implementation` describes the experts of a module.
INTERFACE = (
    "has_gate",
    "has_bias",
    "is_transposed",
    "is_concatenated",
    "has_post_expert_norm",
    "_apply_gate",
)
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class FusedSlice:
    """The part of a fused tensor that is a weight (out, in) or a bias (out,) of an expert.

    Args:
        source: the name of the fused tensor.
        half: 0 for the gate, 1 for the factor that it is multiplied with, None if the tensor is not
            split.
        concatenated: one half follows the other; else their rows alternate.
        transposed: stored as (in, out).
    """

    source: str
    half: int | None
    concatenated: bool
    transposed: bool

    def of(self, stored: Tensor) -> Tensor:
        """The tensor of one expert. stored: the part of that expert in the fused tensor."""
        rows = stored.mT if self.transposed else stored
        if self.half is None:
            return rows
        if self.concatenated:
            return rows.chunk(2)[self.half]
        return rows[self.half :: 2]

    def join(self, halves: list[Tensor]) -> Tensor:
        """The inverse of `of`: the part of an expert in a fused tensor, from its halves or as a
        whole.
        """
        if self.concatenated or len(halves) == 1:
            rows = torch.cat(halves)
        else:
            rows = torch.stack(halves, 1).flatten(0, 1)
        if self.transposed:
            return rows.mT
        return rows


def expert_slices(fused: Any) -> dict[str, dict[str, FusedSlice]]:
    """For each matrix of an expert, by the name of its layer, the slices of `weight` and `bias`."""
    sources: dict[str, tuple[str, int | None]] = {}
    if fused.has_gate:
        sources["gate_proj"] = ("gate_up_proj", 0)
        sources["up_proj"] = ("gate_up_proj", 1)
    else:
        sources["up_proj"] = ("up_proj", None)
    sources["down_proj"] = ("down_proj", None)
    concatenated = fused.is_concatenated
    layers = {}
    for layer, (source, half) in sources.items():
        weight = FusedSlice(source, half, concatenated, fused.is_transposed)
        layers[layer] = {"weight": weight}
        if fused.has_bias:
            layers[layer]["bias"] = FusedSlice(f"{source}_bias", half, concatenated, False)
    return layers


class SplitExperts(nn.Module):
    """The experts of a module of transformers, as children 0, 1, …, each with the linear layers
    `gate_proj` (or without a gate, none), `up_proj` and `down_proj`.

    Args:
        fused: the module, which gives up its weights, and keeps gates, activations and norms.
        config: of the model, for modules without one.
    """

    fused: Any
    layout: Any

    def __init__(self, fused: Any, config: Any = None):
        super().__init__()
        self.__dict__["fused"] = fused  # no child: the children of `fused` become children here
        for name, child in list(fused.named_children()):
            self.add_module(name, child)
        self.__dict__["layout"] = fused if is_fused(fused) else BatchedLayout(fused.act_fn)
        self.calls_every_expert = False
        self.slices = expert_slices(self.layout)
        tensors = dict(fused.named_parameters(recurse=False))
        # The shapes of the fused tensors, by name.
        self.sources = {name: tensor.shape for name, tensor in tensors.items()}
        self.count = len(tensors["down_proj"])
        self.chosen = experts_per_token(getattr(fused, "config", config), self.count)
        for index in range(self.count):
            layers = {}
            for name, slices in self.slices.items():
                weight = slices["weight"]
                out, width = weight.of(tensors[weight.source][index]).shape
                layers[name] = nn.Linear(width, out, bias="bias" in slices, device="meta")
            self.add_module(str(index), nn.ModuleDict(layers))
        for name, tensor in tensors.items():
            self.fill(name, tensor.detach(), tensor.requires_grad)
            del fused._parameters[name]

    def experts(self) -> Iterator[Any]:
        """The experts in order."""
        for index in range(self.count):
            yield self.get_submodule(str(index))

    def fill(
        self,
        source: str,
        fused: Tensor,
        requires_grad: bool = False,
    ) -> None:
        """Give the linear layers that are not compressed their slices of a fused tensor, as views.

        source: the name of the fused tensor.
        """
        for layer, slices in self.slices.items():
            for leaf, part in slices.items():
                if part.source != source:
                    continue
                for index, expert in enumerate(self.experts()):
                    linear = getattr(expert, layer)
                    if isinstance(linear, nn.Linear):
                        view = part.of(fused[index])
                        linear.register_parameter(leaf, nn.Parameter(view, requires_grad))

    def together(self) -> Any:
        """The module of transformers with the weights of the experts in it again."""
        for source in self.sources:
            leaf = "bias" if source.endswith("_bias") else "weight"
            parts = {}
            for layer, slices in self.slices.items():
                if leaf in slices and slices[leaf].source == source:
                    parts[layer] = slices[leaf]
            fused = []
            for expert in self.experts():
                halves = [getattr(expert, layer).get_parameter(leaf).detach() for layer in parts]
                fused.append(next(iter(parts.values())).join(halves))
            parameter = nn.Parameter(torch.stack(fused), requires_grad=False)
            self.fused.register_parameter(source, parameter)
        return self.fused

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Add up the outputs of the chosen experts, (tokens, width).

        Args:
            hidden_states: (tokens, width).
            top_k_index: the experts of each token, (tokens, k); an index past the last expert is
                no expert.
            top_k_weights: their weights, (tokens, k).
        """
        states = hidden_states.flatten(0, -2)
        tokens = len(states)
        chosen = top_k_index.shape[-1]
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=self.count).tolist()[: self.count]
        weights = top_k_weights.flatten()[order].unsqueeze(-1)
        outputs = []
        first = 0
        for expert, count in zip(self.experts(), counts, strict=True):
            rows = order[first : first + count] // chosen
            if count or self.calls_every_expert:
                weighted = self.run(expert, states[rows]) * weights[first : first + count]
                outputs.append(weighted.to(states.dtype))
            first += count
        outputs.append(states.new_zeros(len(order) - first, states.shape[1]))
        by_token = torch.cat(outputs)[order.argsort()].view(tokens, chosen, -1)
        return by_token.sum(1).view(hidden_states.shape)

    def run(self, expert: Any, x: Tensor) -> Tensor:
        """The output of an expert for rows (tokens, width), before its routing weight."""
        if self.layout.has_gate:
            halves = (expert.gate_proj(x), expert.up_proj(x))
            if self.layout.is_concatenated:
                joined = torch.cat(halves, -1)
            else:
                joined = torch.stack(halves, -1).flatten(-2)
            inner = self.layout._apply_gate(joined)
        else:
            inner = self.fused.act_fn(expert.up_proj(x))
        output: Tensor = expert.down_proj(inner)
        if self.layout.has_post_expert_norm:
            return self.fused.post_expert_norm(output)
        return output


def experts_per_token(config: Any, count: int) -> int:
    """The number of experts per token, if a configuration has it; else all, `count`."""
    for name in EXPERTS_PER_TOKEN:
        chosen = getattr(config, name, None)
        if isinstance(chosen, int):
            return chosen
    return count


@dataclass(frozen=True)
class BatchedLayout:
    """`INTERFACE` for `BatchedExperts`, which transformers does not describe. act_fn: of the
    gate.
    """

    act_fn: Callable[[Tensor], Tensor]
    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = True
    is_concatenated: bool = True
    has_post_expert_norm: bool = False

    def _apply_gate(self, joined: Tensor) -> Tensor:
        gate, up = joined.chunk(2, -1)
        return up * self.act_fn(gate)


class BatchedExperts(SplitExperts):
    """Experts that get a row for each token, zeros if the token is not routed to them, as in Llama
    4. Their fused weights are (experts, in, out).
    """

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Rows (experts · tokens, width) after the expert that they belong to."""
        tokens = len(hidden_states) // self.count
        routed = hidden_states.view(self.count, tokens, -1).any(-1)
        expert_of_row, token_of_row = routed.nonzero().unbind(1)
        rows = expert_of_row * tokens + token_of_row
        outputs = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self.experts()):
            chosen = rows[expert_of_row == index]
            if len(chosen) or self.calls_every_expert:
                outputs[chosen] = self.run(expert, hidden_states[chosen]).to(outputs.dtype)
        return outputs


def is_fused(module: Any) -> bool:
    """Return True if a module holds experts behind the interface of transformers, and no other
    tensors.
    """
    if not all(hasattr(module, name) for name in INTERFACE):
        return False
    sources = set()
    for slices in expert_slices(module).values():
        for part in slices.values():
            sources.add(part.source)
    tensors = dict(module.named_parameters(recurse=False)) | dict(
        module.named_buffers(recurse=False)
    )
    return tensors.keys() == sources


def is_batched(module: Any) -> bool:
    """Return True if a module holds experts as `BatchedExperts` takes them."""
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    if is_fused(module):
        return False
    first = parameters["gate_up_proj"].shape
    second = parameters["down_proj"].shape
    if len(first) != 3 or len(second) != 3 or first != (second[0], second[2], 2 * second[1]):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def split_experts(root: nn.Module) -> None:
    """Replace every module of fused experts under root by a `SplitExperts`."""
    model_config: Any = getattr(root, "config", None)
    config = model_config and model_config.get_text_config(decoder=True)
    for name, module in list(root.named_modules()):
        split: SplitExperts | None = None
        if is_fused(module):
            split = SplitExperts(module, config)
        elif is_batched(module):
            split = BatchedExperts(module, config)
        if split is not None:
            parent, _, leaf = name.rpartition(".")
            holder: Any = root.get_submodule(parent)
            setattr(holder, leaf, split)
            # Else transformers would initialise the fused tensors, which are gone.
            holder._is_hf_initialized = True


def fuse_experts(model: Any) -> None:
    """Undo `split_experts`, once no layer of an expert is compressed any more."""
    # Names, not modules: a list of modules would keep their weights beside the fused ones.
    names = [name for name, module in model.named_modules() if isinstance(module, SplitExperts)]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_submodule(name).together())
        # How transformers converts between the tensors of a checkpoint and fused ones, which the
        # split changed.
        vars(model).pop("_weight_conversions", None)


@contextmanager
def every_expert_called(root: nn.Module) -> Iterator[None]:
    """Within it, every pass calls all experts under root, with no rows if no token is routed to
    them.
    """
    with ExitStack() as changes:
        for module in root.modules():
            if isinstance(module, SplitExperts):
                changes.enter_context(replaced(module, "calls_every_expert", True))
        yield


def experts_of(root: nn.Module, name: str) -> tuple[SplitExperts, int] | None:
    """The experts that a layer belongs to, and the index of its expert; None for other layers."""
    parent, _, index = name.rpartition(".")[0].rpartition(".")
    module = root.get_submodule(parent)
    if isinstance(module, SplitExperts) and index.isdigit():
        return module, int(index)
    return None


def share_of_tokens(root: nn.Module, name: str) -> float:
    """The share of all tokens that a layer sees; on average over the experts if it belongs to
    one.
    """
    expert = experts_of(root, name)
    if expert is None:
        return 1.0
    module, _ = expert
    return min(module.chosen / module.count, 1.0)
