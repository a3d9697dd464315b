"""Open a model that is compressed, and plan its layers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.distributed import local_device
from hasslefree.errors import ModelError, option
from hasslefree.models.experts import fuse_experts, split_experts
from hasslefree.models.load import (
    load_config,
    load_on_disk,
    quantization,
    refuse_adapters,
    refuse_compressed,
    resolve_device,
    stored_dtype,
)
from hasslefree.models.rules import Selection
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.models.weights import Weights
from hasslefree.packed.linear import compressed_layers
from hasslefree.planning.plan import Plan
from hasslefree.planning.setup import Setup
from hasslefree.planning.uniform import layer_room, select_and_plan
from hasslefree.progress import LOADING, Phases
from hasslefree.recipe.resolve import Resolved

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """An opened model, and the plan of its layers.

    Args:
        name: as in `Record`.
        tokenizer: None if a loaded model came without one.
        resolved: the recipe, for this model.
        selection: the blocks, and the matrices that are compressed or stay dense.
        room: the bytes that all layers may take.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    weights: Weights
    resolved: Resolved
    selection: Selection
    plan: Plan
    room: int

    @classmethod
    def of(
        cls,
        model: str | Path | PreTrainedModel,
        resolved: Resolved,
        target: torch.device,
        tokenizer: Any,
        trust_remote_code: bool,
        scratch: Path,
        phases: Phases,
    ) -> Self:
        """Open a model and plan its layers. Arguments as for `open_model` and `compress`.

        Args:
            target: where to compute.
            phases: the run in which loading is a phase.
        """
        with phases.phase(LOADING):
            name, loaded, tokenizer = open_model(
                model, resolved.dtype, scratch, tokenizer, trust_remote_code
            )
        weights = Weights(loaded, target)  # first, because it detects tied weights
        resolved, selection, plan = select_and_plan(loaded, resolved)
        # Before any block is read, so that tied weights are counted once.
        room = layer_room(loaded, plan, resolved)
        return cls(name, loaded, tokenizer, weights, resolved, selection, plan, room)

    def setup(self, segments: Tensor, storage: str, processes: int = 1) -> Setup:
        """The compression as the planner sees it.

        Args:
            segments: calibration tokens of all processes, (samples, seqlen).
            storage: where hidden states between blocks are kept.
        """
        samples, seqlen = segments.shape
        return Setup(
            self.model,
            self.selection.blocks,
            self.plan,
            self.resolved,
            samples,
            seqlen,
            self.weights.device,
            storage,
            processes,
        )


def target_of(model: str | Path | PreTrainedModel, device: str | None) -> torch.device:
    """The device to compute on. A loaded model stays on its device; torchrun gives each process a
    GPU.

    Args:
        device: None for the GPU if there is one.

    Raises:
        ModelError: a loaded model is on several devices, or the device has no float64.
    """
    if isinstance(model, PreTrainedModel):
        places = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
        if len(places) > 1 or model.device.type == "meta":
            raise ModelError(
                "the loaded model is offloaded, or spread over several devices; give its name or"
                " folder instead, which is read block by block, or move it to one device"
            )
        target = model.device
    else:
        target = resolve_device(device or local_device())
    try:
        torch.zeros(1, device=target, dtype=torch.float64)
    except (TypeError, RuntimeError) as error:
        raise ModelError(  # such as Apple's GPU
            f"the device {target} has no float64, which the solvers need; use"
            f" {option('device', 'cpu')}"
        ) from error
    return target


def open_model(
    model: str | Path | PreTrainedModel,
    dtype: str,
    scratch: Path,
    tokenizer: Any,
    trust_remote_code: bool,
) -> tuple[str, PreTrainedModel, Any]:
    """Open a model by name, with its weights on the disk, or prepare a loaded model.

    Args:
        scratch: an empty folder for weights that must be converted.

    Returns:
        The name, the model and the tokenizer.
    """
    if isinstance(model, str | Path):
        name = str(model)
        refuse_compressed(load_config(name, trust_remote_code), name)
        tokenizer = tokenizer or load_tokenizer(name, trust_remote_code)
        loaded = load_on_disk(name, dtype, scratch, trust_remote_code)
        split_experts(loaded)
        if dtype == "auto":
            warn_of_dtype(loaded)
        return name, loaded, tokenizer
    name = model.config._name_or_path or type(model).__name__
    refuse_compressed(model.config, name, loaded=True)
    refuse_adapters(model)
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ModelError(
            "the model was loaded inside torch.inference_mode(), so its weights cannot be trained;"
            " load it outside"
        )
    if compressed_layers(model):
        raise ModelError(
            f"the loaded model {name} has layers that an earlier compression has replaced, which"
            f" did not end; load the model again, and continue with {option('resume', True)}"
        )
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ModelError(
            f"the loaded model is {model.dtype}, but the recipe says {dtype}; cast the model first "
            f"(model.to(torch.{dtype})), or leave out {option('dtype')}"
        )
    split_experts(model)
    return name, model.eval(), tokenizer


@contextmanager
def restored(model: str | Path | PreTrainedModel) -> Iterator[None]:
    """Restore a loaded model to its state before `open_model`, unless a layer was compressed:
    transformers cannot save experts that are split.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    training = model.training
    try:
        yield
    finally:
        if not compressed_layers(model):
            fuse_experts(model)
            model.train(training)


def warn_of_dtype(model: PreTrainedModel) -> None:
    """Warn if config.json has another dtype than the stored weights: the run rounds them, or takes
    and counts more bytes.
    """
    if quantization(model.config):
        return
    stored = stored_dtype(Path(str(model.name_or_path)))
    if stored != model.dtype:
        logger.warning(
            "the weights are stored in %s, but config.json says %s, in which the model is run,"
            " written and counted; the dtype %s takes them as they are stored",
            stored,
            model.dtype,
            str(stored).removeprefix("torch."),
        )
