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

# What `use_experts_implementation` says of the experts of a module.
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
class Share:
    """Where a weight (out, in) or bias (out,) of an expert is in a fused tensor.

    source: the name of the tensor. half: 0 for the gate, 1 for what it multiplies, None if the
        tensor is not split.
    concatenated: whether one half follows the other; else their rows alternate. transposed: stored
    as (in, out).
    """

    source: str
    half: int | None
    concatenated: bool
    transposed: bool

    def of(self, stored: Tensor) -> Tensor:
        """The tensor of one expert. stored: that expert's part of the fused one."""
        rows = stored.mT if self.transposed else stored
        if self.half is None:
            return rows
        return rows.chunk(2)[self.half] if self.concatenated else rows[self.half :: 2]


def stored(halves: list[Tensor], share: Share) -> Tensor:
    """The inverse of `Share.of`: an expert's part of a fused tensor, from its halves or as a
    whole.
    """
    rows = (
        torch.cat(halves)
        if share.concatenated or len(halves) == 1
        else torch.stack(halves, 1).flatten(0, 1)
    )
    return rows.mT if share.transposed else rows


def expert_shares(fused: Any) -> dict[str, dict[str, Share]]:
    """For each matrix of an expert, by the name of its layer, where `weight` and `bias` are."""
    first = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
    matrices = (first if fused.has_gate else {"up_proj": ("up_proj", None)}) | {
        "down_proj": ("down_proj", None)
    }
    layers = {}
    for layer, (source, half) in matrices.items():
        layers[layer] = {"weight": Share(source, half, fused.is_concatenated, fused.is_transposed)}
        if fused.has_bias:
            layers[layer]["bias"] = Share(f"{source}_bias", half, fused.is_concatenated, False)
    return layers


class SplitExperts(nn.Module):
    """The experts of a module of transformers, named 0, 1, …; each has `gate_proj`, or not,
    `up_proj` and `down_proj`.

    fused: the module, which gives up its weights, and keeps gates, activations and norms. config:
    if it has none.
    """

    fused: Any
    layout: Any

    def __init__(self, fused: Any, config: Any = None):
        super().__init__()
        self.__dict__["fused"] = fused  # not a child: its children are this module's own
        for name, child in list(fused.named_children()):
            self.add_module(name, child)
        self.__dict__["layout"] = fused if is_fused(fused) else BatchedLayout(fused.act_fn)
        self.calls_every_expert = False
        self.shares = expert_shares(self.layout)
        tensors = dict(fused.named_parameters(recurse=False))
        # By name, the shapes of the fused tensors.
        self.sources = {name: tensor.shape for name, tensor in tensors.items()}
        self.count = len(tensors["down_proj"])
        # Experts per token, if the configuration has their number; else all.
        counts = (
            getattr(getattr(fused, "config", config), name, None) for name in EXPERTS_PER_TOKEN
        )
        self.chosen = next((count for count in counts if isinstance(count, int)), self.count)
        for index in range(self.count):
            layers = {}
            for name, tensors_of in self.shares.items():
                out, width = (
                    tensors_of["weight"].of(tensors[tensors_of["weight"].source][index]).shape
                )
                layers[name] = nn.Linear(width, out, bias="bias" in tensors_of, device="meta")
            self.add_module(str(index), nn.ModuleDict(layers))
        for name, tensor in tensors.items():
            self.fill(name, tensor.detach(), tensor.requires_grad)
            del fused._parameters[name]

    def experts(self) -> Iterator[Any]:
        """The experts in order."""
        return (self.get_submodule(str(index)) for index in range(self.count))

    def fill(self, source: str, fused: Tensor, requires_grad: bool = False) -> None:
        """Give the linear layers that are still there, and not compressed, their share of a fused
        tensor, as views.
        """
        for layer, tensors in self.shares.items():
            for leaf, share in tensors.items():
                if share.source != source:
                    continue
                for index, expert in enumerate(self.experts()):
                    if isinstance(linear := getattr(expert, layer), nn.Linear):
                        linear.register_parameter(
                            leaf, nn.Parameter(share.of(fused[index]), requires_grad)
                        )

    def together(self) -> Any:
        """The module of transformers with the weights of the experts in it again."""
        for source in self.sources:
            leaf = "bias" if source.endswith("_bias") else "weight"
            shares = {
                layer: t[leaf]
                for layer, t in self.shares.items()
                if leaf in t and t[leaf].source == source
            }
            share = next(iter(shares.values()))
            parts = (
                [getattr(expert, layer).get_parameter(leaf).detach() for layer in shares]
                for expert in self.experts()
            )
            fused = torch.stack([stored(halves, share) for halves in parts])
            self.fused.register_parameter(source, nn.Parameter(fused, requires_grad=False))
        return self.fused

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Hidden states (tokens, width) after their experts, (tokens, k); an index past the last
        expert is none.
        """
        states = hidden_states.flatten(0, -2)
        tokens, chosen = len(states), top_k_index.shape[-1]
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=self.count).tolist()[: self.count]
        weights = top_k_weights.flatten()[order].unsqueeze(-1)
        outputs, first = [], 0
        for expert, count in zip(self.experts(), counts, strict=True):
            rows = order[first : first + count] // chosen
            if count or self.calls_every_expert:
                weighted = self.run(expert, states[rows]) * weights[first : first + count]
                outputs.append(weighted.to(states.dtype))
            first += count
        outputs.append(states.new_zeros(len(order) - first, states.shape[1]))
        return (
            torch.cat(outputs)[order.argsort()]
            .view(tokens, chosen, -1)
            .sum(1)
            .view(hidden_states.shape)
        )

    def run(self, expert: Any, x: Tensor) -> Tensor:
        """The output of an expert for rows (tokens, width), before its routing weight."""
        if self.layout.has_gate:
            halves = expert.gate_proj(x), expert.up_proj(x)
            joined = (
                torch.cat(halves, -1)
                if self.layout.is_concatenated
                else torch.stack(halves, -1).flatten(-2)
            )
            inner = self.layout._apply_gate(joined)
        else:
            inner = self.fused.act_fn(expert.up_proj(x))
        output: Tensor = expert.down_proj(inner)
        return self.fused.post_expert_norm(output) if self.layout.has_post_expert_norm else output


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
    """Experts that get a row for each token, zeros if it is not theirs, as in Llama 4; weights
    (experts, in, out).
    """

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Rows (experts · tokens, width) after the expert that they belong to."""
        tokens = len(hidden_states) // self.count
        owner, rows = hidden_states.view(self.count, tokens, -1).any(-1).nonzero().unbind(1)
        places = owner * tokens + rows
        outputs = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self.experts()):
            routed = places[owner == index]
            if len(routed) or self.calls_every_expert:
                outputs[routed] = self.run(expert, hidden_states[routed]).to(outputs.dtype)
        return outputs


def is_fused(module: Any) -> bool:
    """Whether a module holds experts behind the interface of transformers, and no other tensors."""
    if not all(hasattr(module, name) for name in INTERFACE):
        return False
    sources = {
        share.source for tensors in expert_shares(module).values() for share in tensors.values()
    }
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    return parameters == sources and not any(True for _ in module.buffers(recurse=False))


def is_batched(module: Any) -> bool:
    """Whether a module holds experts as `BatchedExperts` takes them."""
    parameters = dict(module.named_parameters(recurse=False))
    if (
        parameters.keys() != {"gate_up_proj", "down_proj"}
        or not hasattr(module, "act_fn")
        or is_fused(module)
    ):
        return False
    first, second = parameters["gate_up_proj"].shape, parameters["down_proj"].shape
    fits = len(first) == len(second) == 3 and first == (second[0], second[2], 2 * second[1])
    return fits and len(inspect.signature(module.forward).parameters) == 1


def split_experts(root: nn.Module) -> None:
    """Replace every module of fused experts under root by a `SplitExperts`."""
    whole: Any = getattr(root, "config", None)
    config = whole and whole.get_text_config(decoder=True)
    for name, module in list(root.named_modules()):
        kind = SplitExperts if is_fused(module) else BatchedExperts if is_batched(module) else None
        if kind is not None:
            parent, _, leaf = name.rpartition(".")
            holder: Any = root.get_submodule(parent)
            setattr(holder, leaf, kind(module, config))
            holder._is_hf_initialized = (
                True  # transformers would fill the fused tensors, which are gone
            )


def fuse_experts(model: Any) -> None:
    """Undo `split_experts`, where no layer of an expert is compressed any more."""
    # A list of names: a list of modules would keep their weights in memory beside the fused ones.
    for name in [
        name for name, module in model.named_modules() if isinstance(module, SplitExperts)
    ]:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_submodule(name).together())
        # How transformers converts between the tensors of a checkpoint and fused ones, which the
        # split changed.
        vars(model).pop("_weight_conversions", None)


@contextmanager
def every_expert_called(root: nn.Module) -> Iterator[None]:
    """Within it, all experts under root are called in every pass, with no rows if no token is
    routed to them.
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
    return (module, int(index)) if isinstance(module, SplitExperts) and index.isdigit() else None


def share_of_tokens(root: nn.Module, name: str) -> float:
    """The share of all tokens that a layer sees, on average over the experts where it belongs to
    one.
    """
    expert = experts_of(root, name)
    return min(expert[0].chosen / expert[0].count, 1.0) if expert else 1.0
