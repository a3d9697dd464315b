"""What a name stands for before a model is loaded: a folder or a model on the hub, or why it is
neither.
"""

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
    """Raise a ModelError if a model is a GGUF file, an adapter, a path that does not exist, or a
    name that the hub does not know.
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
    """Ask the hub once for the config.json of a model that is not in the cache.

    transformers asks for many files, and repeats each request for half a minute if there is no
    network.

    Raises:
        ModelError: there is no such model, the user may not read it, or the hub did not answer.
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
    except Exception as error:  # of the hub, the network or a proxy
        raise ModelError(hub_refusal(name, error)) from error


def hub_refusal(name: str, error: Exception) -> str:
    """Why a model of the hub cannot be read, and what to do."""
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
    """The folder that holds the config.json of a model: a local one, or one in the hub's cache;
    None if neither does.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # the name of a class, or a path that is gone
        return None
    if isinstance(file, str):
        return Path(file).parent
    return None


def recorded_name(name: str) -> str:
    """The name on the hub of a snapshot in its cache; any other name as it is."""
    parts = Path(name).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return "/".join(parts[-3].split("--")[1:])
    return name


def adapter_alone(name: str) -> ModelError:
    """The error for a folder, or a name on the hub, with an adapter of PEFT."""
    return ModelError(
        f"{name} has an adapter, such as a LoRA ({ADAPTER}); merge it into its model first:"
        f" peft.AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()"
        ".save_pretrained(FOLDER), and the same with the tokenizer. If the folder has a model too"
        " and you want that alone, move the adapter elsewhere"
    )
