"""Mixtures of experts: split the fused weights of a block's experts into one linear layer per
matrix.

transformers stores all experts of a block in a few tensors (experts, …); an interface describes
their layout (`integrations.moe.use_experts_implementation`). After the split, an expert's matrices
are ordinary linear layers, calibrated and trained on the tokens routed to the expert.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.models.calls import replaced

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class FusedTensor:
    """The layout of a tensor (experts, …) with the weights (out, in) or biases (out,) of one or two
    layers of every expert.

    Args:
        leaf: "weight" or "bias".
        layers: names of the layers: one, or the gate and the projection that it multiplies.
        concatenated: True if one layer follows the other, False if their rows alternate.
        transposed: True if the tensor is stored as (in, out).
    """

    leaf: str
    layers: tuple[str, ...]
    concatenated: bool
    transposed: bool

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        """Return the tensors of the layers as views. stored: the part of one expert."""
        rows = stored.mT if self.transposed else stored
        count = len(self.layers)
        if self.concatenated:
            return rows.chunk(count)
        return [rows[first::count] for first in range(count)]

    def join(self, tensors: list[Tensor]) -> Tensor:
        """Undo `split`."""
        rows = torch.cat(tensors) if self.concatenated else torch.stack(tensors, 1).flatten(0, 1)
        if self.transposed:
            return rows.mT
        return rows


def fused_tensors(layout: Any) -> dict[str, FusedTensor]:
    """Describe the tensors of a module of experts by name. layout: `SplitExperts.layout`."""
    sources: dict[str, tuple[str, ...]] = {}
    if layout.has_gate:
        sources["gate_up_proj"] = ("gate_proj", "up_proj")
    else:
        sources["up_proj"] = ("up_proj",)
    sources["down_proj"] = ("down_proj",)
    tensors = {}
    for name, layers in sources.items():
        concatenated = layout.is_concatenated
        tensors[name] = FusedTensor("weight", layers, concatenated, layout.is_transposed)
        if layout.has_bias:
            tensors[f"{name}_bias"] = FusedTensor("bias", layers, concatenated, False)
    return tensors


class SplitExperts(nn.Module):
    """The experts of a module of transformers as children 0, 1, …, each with the linear layers
    `gate_proj` (if experts have a gate), `up_proj` and `down_proj`.

    Args:
        fused: the module. Its weights move to the linear layers; gates, activations and norms stay.
        config: configuration of the decoder.
    """

    fused: Any

    def __init__(self, fused: Any, config: Any):
        super().__init__()
        # Not as a child: the children of `fused` become children here.
        self.__dict__["fused"] = fused
        for name, child in list(fused.named_children()):
            self.add_module(name, child)
        self.calls_every_expert = False
        self.trainable = fused.down_proj.requires_grad
        self.tensors = fused_tensors(self.layout)
        # Shapes of the fused tensors by name.
        self.sources = {name: fused.get_parameter(name).shape for name in self.tensors}
        self.count = len(fused.down_proj)
        self.chosen = experts_per_token(config, self.count)
        for index in range(self.count):
            self.add_module(str(index), nn.ModuleDict())
        for name in self.tensors:
            self.fill(name, fused.get_parameter(name).detach())
            del fused._parameters[name]

    @property
    def layout(self) -> Any:
        """The module whose attributes (`has_gate`, …) describe the layout."""
        return self.fused

    def experts(self) -> Iterator[Any]:
        """Yield the experts in order."""
        for index in range(self.count):
            yield self.get_submodule(str(index))

    def fill(self, name: str, fused: Tensor) -> None:
        """Set the weights or biases of the linear layers that are not compressed to views of a
        fused tensor; the first call creates the layers.

        name: name of the fused tensor.
        """
        tensor = self.tensors[name]
        for index, expert in enumerate(self.experts()):
            parts = tensor.split(fused[index])
            for layer, part in zip(tensor.layers, parts, strict=True):
                if layer not in expert:
                    out, width = part.shape
                    expert[layer] = nn.Linear(width, out, self.layout.has_bias, device="meta")
                linear = expert[layer]
                if isinstance(linear, nn.Linear):
                    linear.register_parameter(tensor.leaf, nn.Parameter(part, requires_grad=False))

    def fuse(self) -> Any:
        """Return the module of transformers, with the weights of the experts fused again."""
        for name, tensor in self.tensors.items():
            fused = []
            for expert in self.experts():
                parts = [expert[layer].get_parameter(tensor.leaf) for layer in tensor.layers]
                fused.append(tensor.join(parts).detach())
            parameter = nn.Parameter(torch.stack(fused), requires_grad=self.trainable)
            self.fused.register_parameter(name, parameter)
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
            top_k_index: the experts of each token, (tokens, k); an index past the last expert
                stands for none.
            top_k_weights: routing weights, (tokens, k).
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
        """The output of an expert for rows (tokens, width), without the routing weight."""
        if self.layout.has_gate:
            halves = (expert.gate_proj(x), expert.up_proj(x))
            if self.layout.is_concatenated:
                joined = torch.cat(halves, -1)
            else:
                joined = torch.stack(halves, -1).flatten(-2)
            inner = self.layout._apply_gate(joined)
        else:
            inner = self.fused.act_fn(expert.up_proj(x))
        output = expert.down_proj(inner)
        if self.layout.has_post_expert_norm:
            return self.fused.post_expert_norm(output)
        return output


def experts_per_token(config: Any, count: int) -> int:
    """Number of experts per token in the configuration; `count`, all experts, if not given."""
    for name in EXPERTS_PER_TOKEN:
        chosen = getattr(config, name, None)
        if isinstance(chosen, int):
            return chosen
    return count


class BatchedExperts(SplitExperts):
    """Experts that each get a row for every token, zeros if the token is not routed to the expert,
    as in Llama 4. The fused weights are (experts, in, out).
    """

    # The attributes that `use_experts_implementation` adds to other modules.
    has_gate = True
    has_bias = False
    is_transposed = True
    is_concatenated = True
    has_post_expert_norm = False

    @property
    def layout(self) -> Any:
        return self

    def _apply_gate(self, joined: Tensor) -> Tensor:
        gate, up = joined.chunk(2, -1)
        return up * self.fused.act_fn(gate)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Run each expert on its rows; hidden_states and output: (experts · tokens, width)."""
        routed = hidden_states.unflatten(0, (self.count, -1)).any(-1)  # (experts, tokens)
        experts = torch.arange(self.count, device=routed.device).unsqueeze(1)
        chosen = experts.where(routed, self.count).view(-1, 1)
        return super().forward(hidden_states, chosen, hidden_states.new_ones(chosen.shape))


def is_fused(module: Any) -> bool:
    """Return True if a module has the experts interface of transformers, and no other tensors."""
    if not hasattr(module, "is_concatenated"):
        return False
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return dict(held).keys() == fused_tensors(module).keys()


def is_batched(module: Any) -> bool:
    """Return True if a module holds experts of the kind that `BatchedExperts` splits."""
    names = dict(module.named_parameters(recurse=False)).keys()
    if names != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    if module.down_proj.ndim != 3:
        return False
    count, inner, width = module.down_proj.shape
    return module.gate_up_proj.shape == (count, width, 2 * inner)


def expert_modules(model: nn.Module) -> list[str]:
    """Names of the modules that hold experts, split or fused."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, SplitExperts) or is_fused(module) or is_batched(module)
    ]


def split_experts(model: Any) -> None:
    """Replace each module of fused experts in a model by `SplitExperts`."""
    config = model.config.get_text_config(decoder=True)
    for name, module in list(model.named_modules()):
        if is_fused(module):
            split = SplitExperts(module, config)
        elif is_batched(module):
            split = BatchedExperts(module, config)
        else:
            continue
        model.set_submodule(name, split)
        # Otherwise transformers would initialise the fused tensors, which no longer exist.
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True


def fuse_experts(model: Any) -> None:
    """Undo `split_experts`. No layer of an expert may be compressed."""
    # A list of modules instead of names would keep their weights in memory.
    names = [name for name, module in model.named_modules() if isinstance(module, SplitExperts)]
    for name in names:
        model.set_submodule(name, model.get_submodule(name).fuse())
        # Conversions between checkpoint and fused tensors, which the split changed.
        vars(model).pop("_weight_conversions", None)


@contextmanager
def every_expert_called(root: nn.Module) -> Iterator[None]:
    """Let every pass call all experts under `root`; an expert without tokens gets no rows."""
    with ExitStack() as changes:
        for module in root.modules():
            if isinstance(module, SplitExperts):
                changes.enter_context(replaced(module, "calls_every_expert", True))
        yield


def experts_of(root: nn.Module, name: str) -> SplitExperts | None:
    """Return the experts that a layer belongs to; None for other layers."""
    parent, _, index = name.rpartition(".")[0].rpartition(".")
    module = root.get_submodule(parent)
    if isinstance(module, SplitExperts) and index.isdigit():
        return module
    return None


def share_of_tokens(root: nn.Module, name: str) -> float:
    """Share of all tokens that a layer sees: for a layer of an expert, on average over experts."""
    experts = experts_of(root, name)
    if experts is None:
        return 1.0
    return min(experts.chosen / experts.count, 1.0)
