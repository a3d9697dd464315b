"""Check the name of a model before it is loaded: it must be a folder, or a model on the hub."""

from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers.utils.peft_utils import find_adapter_config_file

from hasslefree.errors import ModelError
from hasslefree.texts.hub import PATIENCE

ADAPTER = "adapter_config.json"


def check_name(name: str) -> None:
    """Raise a ModelError if a name is a GGUF file, another file, an adapter, a path that does not
    exist, or a model that is not on the hub.
    """
    path = Path(name)
    if name.endswith(".gguf"):
        raise ModelError(
            f"{name} is a GGUF file; convert it to a model folder first:"
            f" AutoModelForCausalLM.from_pretrained({str(path.parent)!r},"
            f" gguf_file={path.name!r}).save_pretrained(FOLDER), and the same with AutoTokenizer"
            " (transformers needs the package gguf for this)"
        )
    if path.is_file():
        raise ModelError(
            f"{name} is a file; give the folder of a model, with config.json and weights"
        )
    if (path / ADAPTER).is_file():
        raise adapter_alone(name)
    if path.is_dir():
        return
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"the model folder {name} does not exist; check its path")
    check_on_hub(name)


def check_on_hub(name: str) -> None:
    """Request the config.json of a model from the hub, once, unless it is in the cache.

    Without a network, transformers would repeat requests for many files, each for half a minute.

    Raises:
        ModelError: there is no such model, the user may not read it, or the hub does not answer.
    """
    try:
        address = hf_hub_url(name, "config.json")
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(address, timeout=PATIENCE)
    except EntryNotFoundError as error:
        if find_adapter_config_file(name):
            raise adapter_alone(name) from error
        raise ModelError(
            f"{name!r} has no config.json on the hub; give a model that transformers loads"
        ) from error
    except Exception as error:  # from the hub, the network or a proxy
        raise ModelError(hub_refusal(name, error)) from error


def hub_refusal(name: str, error: Exception) -> str:
    """Return why a model of the hub cannot be read, and what the user can do."""
    missing = f"{name!r} is neither a local folder nor"
    if isinstance(error, HFValidationError):
        return f"{missing} a name on the hub, which is USER/NAME; check the spelling"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{missing} in the cache, and HF_HUB_OFFLINE is set; give a folder, or unset it"
    if isinstance(error, GatedRepoError):
        return (
            f"{name!r} is gated: accept its licence at https://huggingface.co/{name}, then run `hf"
            " auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{missing} a model that you can see on the hub: check the spelling; if it is private,"
            " run `hf auth login`"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"the hub failed with status {status} when asked for {name!r}; try again later"
    return (
        f"{missing} in the cache, and there is no connection to the hub; give a folder, or check"
        " the network"
    )


def folder_of(name: str) -> Path | None:
    """Return the folder with the config.json of a model: a local folder, or one in the hub's cache;
    None if there is none.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # the name of a class, or a deleted path
        return None
    if isinstance(file, str):
        return Path(file).parent
    return None


def recorded_name(name: str) -> str:
    """Return the hub name of a snapshot in the hub's cache; any other name unchanged."""
    parts = Path(name).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return "/".join(parts[-3].split("--")[1:])
    return name


def adapter_alone(name: str) -> ModelError:
    """Return the error for a folder or a repository with an adapter of PEFT."""
    return ModelError(
        f"{name} has an adapter, such as a LoRA ({ADAPTER}); merge it into its model first:"
        f" peft.AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()"
        ".save_pretrained(FOLDER), and the same with the tokenizer. If the folder has a model too"
        " and you want that alone, move the adapter elsewhere"
    )
