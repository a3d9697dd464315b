"""Load a causal language model from a hub name or a local folder."""

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from hasslefree.errors import CheckpointError, HasslefreeError, ModelError, UnknownNameError, option
from hasslefree.files import MOST_BYTES, read_json, stored_tensors, weight_files
from hasslefree.models.calls import replaced
from hasslefree.validation import Dtype

# By type of model, the class that takes text alone, and the one that takes images or sound beside
# it.
CAUSAL: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL: dict[str, str] = dict(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
# Files of a folder that transformers reads whole, and the most layers or experts that one of them
# may ask for.
SETTINGS = (
    "*config.json",
    "*token*.json",
    "*.index.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
MOST_MODULES = 4096
AGAIN = "if one of its files is damaged or truncated, download or copy it again"


def load_config(name: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a decoder. trust_remote_code: run code that comes with the model."""
    check_name(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers does not check what the file holds
        raise no_model(name, error) from error
    known = config.model_type in CAUSAL or config.model_type in MULTIMODAL
    own = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    parts = (config, config.get_text_config(decoder=True))
    if not (known or own) or any(getattr(part, "is_encoder_decoder", False) for part in parts):
        raise ModelError(
            f"{name} is a {config.model_type} model, which is not a decoder; "
            "hasslefree compresses causal language models"
        )
    if not own:
        check_reads_text(name, config)
    return config


def check_name(name: str) -> None:
    """Raise a ModelError if a model is a GGUF file, or a path that does not exist."""
    if name.endswith(".gguf"):
        file = Path(name)
        raise ModelError(
            f"{name} is a GGUF file; convert it to a model folder first:"
            f" AutoModelForCausalLM.from_pretrained({str(file.parent)!r},"
            f" gguf_file={file.name!r}).save_pretrained(FOLDER), and the same with AutoTokenizer"
            " (transformers needs the package gguf for this)"
        )
    if Path(name).is_file():
        raise ModelError(
            f"{name} is a file; give the folder of a model, with config.json and weights"
        )
    if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise ModelError(f"the model folder {name} does not exist; check its path")
    for file in (file for pattern in SETTINGS for file in Path(name).glob(pattern)):
        check_settings(file)


def check_settings(file: Path) -> None:
    """Raise a CheckpointError if reading a file, or building the model that it describes, would not
    end.
    """
    if file.name != "config.json":
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            raise CheckpointError(
                f"{file} is no regular file, or larger than {MOST_BYTES:,} bytes; download it again"
            )
        return
    parts = [read_json(file)]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            if (
                isinstance(value, int)
                and value > MOST_MODULES
                and re.search("layer|experts$|num_labels", key)
            ):
                raise CheckpointError(
                    f"{file}: {key} is {value:.4g}, which no model has; download or copy it again"
                )


@contextmanager
def loading(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever transformers raises about a folder into a CheckpointError. what: could not be
    done.
    """
    try:
        yield
    except (HasslefreeError, MemoryError, torch.OutOfMemoryError, BrokenPipeError):
        raise
    except BaseException as error:
        if (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):  # of tokenizers, in Rust
            raise CheckpointError(f"{what}: {first_line(error)}; {remedy}") from error
        raise


def no_model(name: str, error: Exception) -> ModelError:
    """The error for a name that transformers does not know. error: from transformers, with that of
    the hub as cause.
    """
    if Path(name).is_dir():
        return ModelError(
            f"no model at {name!r}: {first_line(error)}; give a folder with config.json and weights"
        )
    if isinstance(error.__cause__, GatedRepoError):
        return ModelError(
            f"{name!r} is gated: accept its licence at https://huggingface.co/{name}, then run `hf"
            " auth login`"
        )
    if isinstance(error.__cause__, RepositoryNotFoundError):
        return ModelError(
            f"{name!r} is neither a local folder nor a model that you can see on the hub: check the"
            " spelling; if the model is private, run `hf auth login` with a token that can read it"
        )
    return ModelError(
        f"{name!r} is no folder here, and as a name on the hub it cannot be loaded:"
        f" {first_line(error).rstrip('.')}; check name and network"
    )


def check_reads_text(name: str, config: Any) -> None:
    """Raise a ModelError if the class of a model does not run on token ids alone."""
    kind = auto_class(config)._model_mapping.get(type(config), None)
    if kind is None:  # transformers says so itself when the model is made
        return
    forward = inspect.signature(kind.forward).parameters if "forward" in dir(kind) else {}
    needed = {
        key
        for key, each in forward.items()
        if each.default is each.empty and "VAR_" not in each.kind.name
    }
    if "input_ids" not in forward or needed - {"self", "input_ids"}:
        raise ModelError(
            f"{name} is a {kind.__name__}, which needs more inputs than text; hasslefree compresses"
            " language models"
        )


def auto_class(config: Any) -> Any:
    """The Auto class of transformers for a configuration: multimodal if it names such a model."""
    multimodal = MULTIMODAL.get(config.model_type)
    named = getattr(config, "architectures", None)
    if multimodal and (config.model_type not in CAUSAL or named == [multimodal]):
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def refuse_compressed(config: Any, name: str) -> None:
    """Raise a ModelError if a model is quantised or compressed already."""
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{name} is already quantised or compressed; start from the original checkpoint"
        )


def load_model(
    name: str, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in evaluation mode.

    Args:
        dtype: "auto" for the checkpoint's, or "float32", "bfloat16", "float16".
        device: such as "cpu" or "cuda"; None for the GPU if there is one.
        trust_remote_code: run code that comes with the model.
    """
    if dtype not in (known := get_args(Dtype)):
        raise UnknownNameError("dtype", dtype, known)
    target = resolve_device(device)
    model: Any = _from_pretrained(name, trust_remote_code, dtype=dtype)
    return model.to(target)


def load_shapes(name: str, dtype: str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without weights: every parameter is on the meta device. No weight file is read."""
    config = load_config(name, trust_remote_code)
    chosen = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with (
        loading(f"the model {name!r} could not be built from its config.json", AGAIN),
        torch.device("meta"),
    ):
        return auto_class(config).from_config(
            config, dtype=chosen, trust_remote_code=trust_remote_code
        )


def load_on_disk(
    name: str, dtype: str, folder: Path, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in evaluation mode, its parameters still in files; those to convert in `folder`,
    which must last.
    """
    where = {"device_map": {"": "disk"}, "offload_folder": str(folder)}
    # accelerate warns that weights stay on the disk, which is wanted here.
    with replaced(logging.getLogger("accelerate.big_modeling"), "disabled", True):
        return _from_pretrained(name, trust_remote_code, dtype=dtype, **where)


def _from_pretrained(name: str, trust_remote_code: bool, **how: Any) -> PreTrainedModel:
    auto = auto_class(load_config(name, trust_remote_code))
    folder = Path(name)
    if folder.is_dir():
        refuse_pickles(folder)
        stored_tensors(weight_files(folder))  # names a damaged file, which transformers does not
    with loading(f"the model {name!r} could not be loaded", AGAIN):
        how |= {
            "trust_remote_code": trust_remote_code,
            "use_safetensors": True,
        }  # pickles are programs
        model, info = auto.from_pretrained(name, output_loading_info=True, **how)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"the checkpoint {name!r} lacks {len(missing)} tensors of a {type(model).__name__}:"
            f" {', '.join(missing[:6])}; use a checkpoint of this class, or download or copy it"
            " again"
        )
    return model.eval()


def refuse_pickles(folder: Path) -> None:
    """Raise a ModelError if a folder has its weights in pickle files alone."""
    if any(folder.glob("*.safetensors")) or not any(folder.glob("pytorch_model*.bin")):
        return
    raise ModelError(
        f"{folder} has its weights in pickle files (pytorch_model.bin), which can run any code"
        " when they are loaded; if you trust them, convert them to safetensors:"
        f" AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
    )


def resolve_device(device: str | None) -> torch.device:
    """The device of this name; None means the first GPU if there is one."""
    try:
        resolved = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ModelError(
            f"unknown device {device!r}; use, for example, cpu, cuda or cuda:1"
        ) from None
    try:
        torch.zeros(1, device=resolved).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(
            f"device {device!r} cannot be used: {first_line(error)}; use {option('device', 'cpu')}"
        ) from None
    return resolved


def most_positions(model: nn.Module) -> int | None:
    """The tokens that a model takes at once; None if there is no limit."""
    config: Any = model.config
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return most if most is not None and most >= 1 else None  # XLNet has -1: no limit


def resolve_seqlen(model: nn.Module, asked: int | None) -> int:
    """The segment length: the given one, or 2048, or the model's limit if that is less. A
    ModelError if it is more.
    """
    most = most_positions(model)
    if most is not None and asked is not None and asked > most:
        raise ModelError(
            f"the model takes at most {most} tokens at once, but seqlen is {asked}; use"
            f" {option('seqlen', most)}"
        )
    return min(2048, most or 2048) if asked is None else asked


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
