"""Mixtures of experts: the fused weights of a block's experts, split into a linear layer for each
matrix.

transformers keeps all experts of a block in a few tensors (experts, …), whose layout one interface
describes (`integrations.moe.use_experts_implementation`). Once split, an expert's matrices are
linear layers like all others, calibrated and trained on the tokens routed to the expert.
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
    """The layout of a tensor (experts, …) that holds the weights (out, in), or the biases (out,),
    of one or two layers of every expert.

    Args:
        leaf: "weight" or "bias".
        layers: the layers: one, or the gate and the factor that it is multiplied with.
        concatenated: one layer follows the other; else their rows alternate.
        transposed: stored as (in, out).
    """

    leaf: str
    layers: tuple[str, ...]
    concatenated: bool
    transposed: bool

    def split(self, stored: Tensor) -> Sequence[Tensor]:
        """The tensors of the layers, as views. stored: the part of one expert."""
        rows = stored.mT if self.transposed else stored
        count = len(self.layers)
        if self.concatenated:
            return rows.chunk(count)
        return [rows[first::count] for first in range(count)]

    def join(self, tensors: list[Tensor]) -> Tensor:
        """The inverse of `split`."""
        rows = torch.cat(tensors) if self.concatenated else torch.stack(tensors, 1).flatten(0, 1)
        if self.transposed:
            return rows.mT
        return rows


def fused_tensors(layout: Any) -> dict[str, FusedTensor]:
    """The tensors of a module of experts by name. layout: as of `SplitExperts`."""
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
    """The experts of a module of transformers, as children 0, 1, …, each with the linear layers
    `gate_proj` (or without a gate, none), `up_proj` and `down_proj`.

    Args:
        fused: the module, which gives up its weights, and keeps gates, activations and norms.
        config: of the decoder.
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
        # The shapes of the fused tensors, by name.
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
        """The description of the fused tensors, which transformers adds to the module."""
        return self.fused

    def experts(self) -> Iterator[Any]:
        """The experts in order."""
        for index in range(self.count):
            yield self.get_submodule(str(index))

    def fill(self, name: str, fused: Tensor) -> None:
        """Give the linear layers that are not compressed their parts of a fused tensor, as views;
        the first time, make the layers.

        name: of the fused tensor.
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
        """The module of transformers with the weights of the experts in it again."""
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


class BatchedExperts(SplitExperts):
    """Experts that get a row for each token, zeros if the token is not routed to them, as in Llama
    4. Their fused weights are (experts, in, out).
    """

    # Of the attributes that `use_experts_implementation` gives other modules.
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
        """Rows (experts · tokens, width) after the expert that they belong to."""
        routed = hidden_states.unflatten(0, (self.count, -1)).any(-1)  # (experts, tokens)
        experts = torch.arange(self.count, device=routed.device).unsqueeze(1)
        chosen = experts.where(routed, self.count).view(-1, 1)
        return super().forward(hidden_states, chosen, hidden_states.new_ones(chosen.shape))


def is_fused(module: Any) -> bool:
    """Return True if a module holds experts behind the interface of transformers, and no other
    tensors.
    """
    if not hasattr(module, "is_concatenated"):
        return False
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return dict(held).keys() == fused_tensors(module).keys()


def is_batched(module: Any) -> bool:
    """Return True if a module holds experts as `BatchedExperts` takes them."""
    names = dict(module.named_parameters(recurse=False)).keys()
    if names != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    down = module.down_proj
    return down.ndim == 3 and module.gate_up_proj.shape == (
        len(down),
        down.shape[2],
        2 * down.shape[1],
    )


def expert_modules(model: nn.Module) -> list[str]:
    """The names of the modules that hold experts, split or not."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, SplitExperts) or is_fused(module) or is_batched(module)
    ]


def split_experts(model: Any) -> None:
    """Replace every module of fused experts of a model by a `SplitExperts`."""
    config = model.config.get_text_config(decoder=True)
    for name, module in list(model.named_modules()):
        if is_fused(module):
            split = SplitExperts(module, config)
        elif is_batched(module):
            split = BatchedExperts(module, config)
        else:
            continue
        model.set_submodule(name, split)
        # Else transformers would initialise the fused tensors, which are gone.
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True


def fuse_experts(model: Any) -> None:
    """Undo `split_experts`, once no layer of an expert is compressed any more."""
    # Names, not modules: a list of modules would keep their weights beside the fused ones.
    names = [name for name, module in model.named_modules() if isinstance(module, SplitExperts)]
    for name in names:
        model.set_submodule(name, model.get_submodule(name).fuse())
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
