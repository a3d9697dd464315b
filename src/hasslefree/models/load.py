"""Load a causal language model from a hub name or a local folder."""

import errno
import inspect
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AutoQuantizationConfig

from hasslefree.errors import (
    CheckpointError,
    HasslefreeError,
    ModelError,
    UnknownNameError,
    WriteError,
    lacks_memory,
    option,
)
from hasslefree.files import stored_tensors, weight_files
from hasslefree.models.calls import replaced
from hasslefree.models.names import check_name, folder_of
from hasslefree.validation import Dtype

# By type of model: the class for text alone, and the class that also takes images or sound.
CAUSAL: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL: dict[str, str] = dict(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
# Formats of released checkpoints that transformers can dequantise.
DEQUANTISED = ("fp8", "mxfp4")
TRUST_CODE = f"if you trust it, run it with {option('trust_remote_code', True)}"
DOWNLOAD_AGAIN = "if one of its files is damaged or truncated, download or copy it again"


def load_config(name: str, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a decoder. trust_remote_code: run code that comes with the model.

    Raises a ModelError if there is no such model, or if it is not a decoder.
    """
    check_name(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers does not validate the file
        raise no_model(name, error) from error
    has_own_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = config.model_type in CAUSAL or config.model_type in MULTIMODAL
    if has_own_class and not trust_remote_code and not known:
        raise untrusted_code(name)
    parts = (config, config.get_text_config(decoder=True))
    encodes = any(part.is_encoder_decoder for part in parts)
    if encodes or not (known or has_own_class):
        raise ModelError(
            f"{name} is a {config.model_type} model, which is not a decoder; "
            "hasslefree compresses causal language models"
        )
    if not (has_own_class and trust_remote_code):
        check_reads_text(name, config)
    return config


@contextmanager
def loading(what: str, remedy: str) -> Iterator[None]:
    """Convert errors of transformers about a folder to a CheckpointError. Errors about memory are
    left as they are.

    Args:
        what: what failed, such as "the model 'a' could not be loaded".
        remedy: what the user can do.
    """
    try:
        yield
    except (HasslefreeError, BrokenPipeError):
        raise
    except BaseException as error:
        # A panic of the Rust library tokenizers is not an `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if lacks_memory(error):
            raise
        if wants_trust(error):
            remedy = TRUST_CODE
        raise CheckpointError(f"{what}: {first_line(error)}; {remedy}") from error


def no_model(name: str, error: Exception) -> ModelError:
    """Return the error for a model that transformers cannot read."""
    if wants_trust(error):
        return untrusted_code(name)
    return ModelError(
        f"no model at {name!r}: {first_line(error)}; give a folder with config.json and weights"
    )


def wants_trust(error: BaseException) -> bool:
    """Return True if transformers refused to run code that comes with a model."""
    return "trust_remote_code=True" in str(error)


def untrusted_code(name: str) -> ModelError:
    return ModelError(f"{name} comes with Python code of its own, which is not run; {TRUST_CODE}")


def refuse_adapters(model: nn.Module) -> None:
    """Raise a ModelError if a model contains layers of PEFT, such as LoRA layers."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ModelError(
                f"{name} is a layer with an adapter (PEFT's {type(module).__name__}); merge it"
                " first: peft.PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload() gives"
                " the model to compress"
            )


def check_reads_text(name: str, config: Any) -> None:
    """Raise a ModelError if a model needs more inputs than token ids."""
    kind = auto_class(config)._model_mapping.get(type(config), None)
    if kind is None:  # transformers raises an error when it builds the model
        return
    if not takes_ids_alone(kind.forward):
        raise ModelError(
            f"{name} is a {kind.__name__}, which needs more inputs than text; hasslefree compresses"
            " language models"
        )


def takes_ids_alone(forward: Any) -> bool:
    """Return True if a method `forward` can be called with token ids and nothing else."""
    signature = inspect.signature(forward)
    try:
        signature.bind(None, input_ids=None)
    except TypeError:  # more parameters are required
        return False
    return "input_ids" in signature.parameters


def auto_class(config: Any) -> Any:
    """Return the Auto class of transformers for a configuration."""
    multimodal = MULTIMODAL.get(config.model_type)
    is_named = config.architectures == [multimodal]
    if multimodal and (config.model_type not in CAUSAL or is_named):
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def quantization(config: Any) -> dict[str, Any]:
    """Return the `quantization_config` of a configuration; empty if there is none."""
    settings = getattr(config, "quantization_config", None) or {}
    if isinstance(settings, dict):
        return settings
    return dict(settings.to_dict())


def refuse_compressed(config: Any, name: str, loaded: bool = False) -> None:
    """Raise a ModelError if a model is already quantised or compressed.

    Args:
        loaded: True if the model is in memory; if not, the formats in `DEQUANTISED` are accepted.
    """
    settings = quantization(config)
    if not settings:
        return
    method = settings.get("quant_method")
    remedy = "start from the checkpoint that it was made from"
    if method in DEQUANTISED:
        if not loaded:
            return
        remedy = "give its name or folder, so that it is dequantised as it is loaded"
    raise ModelError(f"{name} is already quantised or compressed ({method}); {remedy}")


def check_dtype(dtype: str) -> None:
    """Raise an UnknownNameError for a dtype that `load_model` does not take."""
    known = get_args(Dtype)
    if dtype not in known:
        raise UnknownNameError("dtype", dtype, known)


def load_model(
    name: str, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a model in evaluation mode.

    Args:
        dtype: "auto" for the dtype of the checkpoint, or "float32", "bfloat16", "float16".
        device: a device such as "cpu" or "cuda"; None for the GPU if there is one.
        trust_remote_code: run code that comes with the model.
    """
    check_dtype(dtype)
    target = resolve_device(device)
    model: Any = _from_pretrained(name, trust_remote_code, dtype=dtype)
    return model.to(target)


def load_shapes(
    name: str,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build a model with all parameters on the meta device, without reading weights.

    Its `name_or_path` is the folder of its files if they are on this machine.
    """
    config = load_config(name, trust_remote_code)
    folder = folder_of(name) or Path(name)
    chosen = config.dtype or config.get_text_config(decoder=True).dtype or stored_dtype(folder)
    if dtype != "auto":
        chosen = getattr(torch, dtype)
    with (
        loading(f"the model {name!r} could not be built from its config.json", DOWNLOAD_AGAIN),
        torch.device("meta"),
    ):
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=chosen, trust_remote_code=trust_remote_code
        )
    model.name_or_path = str(folder)
    return model


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the most frequent floating-point dtype in the files of a model, by number of values;
    dtypes of eight bits do not count. float32 if no file can be read.
    """
    numbers: Counter[torch.dtype] = Counter()
    with suppress(CheckpointError):
        for tensor in stored_tensors(weight_files(folder)).values():
            if tensor.meta.is_floating_point() and tensor.meta.itemsize > 1:
                numbers[tensor.meta.dtype] += tensor.meta.numel()
    return max(numbers, key=lambda dtype: numbers[dtype], default=torch.float32)


def load_on_disk(
    name: str, dtype: str, scratch: Path, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a model in evaluation mode, and leave its parameters in files.

    Args:
        scratch: folder for converted parameters; it must exist as long as the model.

    Returns:
        The model. Its `name_or_path` is the folder of its files.

    Raises:
        WriteError: the disk of the scratch folder is full.
    """
    # Silence the warning of accelerate that weights stay on the disk.
    with replaced(logging.getLogger("accelerate.big_modeling"), "disabled", True):
        try:
            model = _from_pretrained(
                name,
                trust_remote_code,
                dtype=dtype,
                device_map={"": "disk"},
                offload_folder=str(scratch),
            )
        except CheckpointError as error:
            if os.strerror(errno.ENOSPC) not in error.message:
                raise
            raise WriteError(
                f"the disk of {scratch} is full: weights that are stored in another form are"
                " converted and kept there during the run; free some space"
            ) from error
    model.name_or_path = str(weights_folder(model, scratch) or folder_of(name) or name)
    return model


def weights_folder(model: PreTrainedModel, scratch: Path) -> Path | None:
    """Return the folder from which a model on the disk is read; None if all parameters were
    converted.

    For a model of the hub, its revision may differ from that of the configuration: if a repository
    has only pickle files, transformers reads the files that the hub converted.
    """
    for module in model.modules():
        # Each hook of accelerate has the files of all parameters.
        stored = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if stored is None:
            continue
        for entry in stored.dataset.index.values():
            folder = Path(entry["safetensors_file"]).parent
            if folder != scratch:
                return folder
    return None


def _from_pretrained(name: str, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    config = load_config(name, trust_remote_code)
    auto = auto_class(config)
    settings = quantization(config)
    if settings.get("quant_method") in DEQUANTISED:
        dequantised = AutoQuantizationConfig.from_dict(settings | {"dequantize": True})
        options["quantization_config"] = dequantised
    elif hasattr(config, "quantization_config") and not settings:  # transformers refuses {}
        del config.quantization_config
        options["config"] = config
    folder = Path(name)
    if folder.is_dir():
        refuse_pickles(folder)
        stored_tensors(weight_files(folder))  # unlike transformers, names a damaged file
    with loading(f"the model {name!r} could not be loaded", DOWNLOAD_AGAIN):
        model, info = auto.from_pretrained(
            name,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            **options,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the checkpoint {name!r} lacks {len(missing)} tensors of a {type(model).__name__}:"
            f" {', '.join(missing[:6])}; use a checkpoint of this class, or download or copy it"
            " again"
        )
    return model


def refuse_pickles(folder: Path) -> None:
    """Raise a ModelError if a folder has its weights only in pickle files."""
    if any(folder.glob("*.safetensors")) or not any(folder.glob("pytorch_model*.bin")):
        return
    raise ModelError(
        f"{folder} has its weights in pickle files (pytorch_model.bin), which can run any code"
        " when they are loaded; if you trust them, convert them to safetensors:"
        f" AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
    )


def resolve_device(device: str | None) -> torch.device:
    """Return a device, after a check that it can be used. None: the first GPU if there is one, else
    the CPU.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(name)
        torch.zeros(1, device=resolved).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # The second sentence of the error lists all types of device in torch.
        reason, _, _ = first_line(error).partition(". ")
        raise ModelError(
            f"device {name!r} cannot be used: {reason}; use {option('device', 'cpu')}"
        ) from None
    return resolved


def most_positions(model: nn.Module) -> int | None:
    """Return the largest number of tokens that a model takes at once; None if unlimited."""
    config: Any = model.config
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None or most < 1:  # XLNet has -1: no limit
        return None
    return most


def check_ids(model: nn.Module, tokens: Tensor, tokenizer: Any = None) -> None:
    """Check that token ids (any shape) are in the vocabulary of a model.

    Args:
        tokenizer: used to name the token in the error; None if there is none.

    Raises:
        ModelError: a token id is outside the vocabulary.
    """
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None or not tokens.numel():
        return
    vocabulary = embeddings.num_embeddings
    for wrong in (int(tokens.min()), int(tokens.max())):
        if 0 <= wrong < vocabulary:
            continue
        name = "" if tokenizer is None else f", {tokenizer.convert_ids_to_tokens(wrong)!r},"
        raise ModelError(
            f"the token id {wrong}{name} is outside the model's vocabulary (0 to {vocabulary - 1});"
            " use the tokenizer of this model, or give the model rows for its tokens:"
            " model.resize_token_embeddings(len(tokenizer))"
        )


def resolve_seqlen(model: nn.Module, asked: int | None) -> int:
    """Return the segment length in tokens: `asked`, by default 2048 or the model's limit if less.

    Raises a ModelError if `asked` exceeds the model's limit.
    """
    most = most_positions(model)
    if asked is None:
        return min(2048, most or 2048)
    if most is not None and asked > most:
        raise ModelError(
            f"the model takes at most {most} tokens at once, but seqlen is {asked}; use"
            f" {option('seqlen', most)}"
        )
    return asked


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
