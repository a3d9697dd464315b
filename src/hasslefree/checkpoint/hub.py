"""Upload folders to the Hugging Face Hub, and check the repository before hours of work."""

import re
import shlex
from pathlib import Path

from huggingface_hub import auth_check, create_repo, model_info, upload_folder, whoami
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from hasslefree.checkpoint.card import TAG
from hasslefree.checkpoint.output import FILES, rewrite
from hasslefree.errors import OutputError, option
from hasslefree.validation import typed

# The first match in a card is the location of the model: a path, or an earlier upload.
SHOWN = re.compile(r'(from_pretrained\("|hf download )([^"\s]+)(["\s])')


@typed
def push(
    folder: str | Path,
    name: str,
    *,
    private: bool = False,
) -> str:
    """Upload a folder that `compress` or `export` wrote to the Hugging Face Hub, and return its
    address there.

    The repository becomes a copy of the folder: other files in it are deleted, but stay in its
    history. In the model card, the path is replaced with the name on the hub.

    Args:
        name: USER/NAME or ORGANISATION/NAME. It is created if it does not exist, public unless
            private is True.

    Raises:
        OutputError: the repository cannot be created or holds another model, or the upload failed.
    """
    for file in ("README.md", FILES):
        if not (Path(folder) / file).is_file():
            raise OutputError(
                f"{folder} has no {file}; push takes a folder that compress or export wrote"
            )
    prepare_push(name, private)
    return upload(Path(folder), name)


def prepare_push(name: str, private: bool = False) -> None:
    """Create the repository, or check that it may be replaced. Arguments and errors are those of
    `push`.
    """
    try:
        validate_repo_id(name if "/" in name else "")
        whoami()
        url = create_repo(name, private=private or None, exist_ok=True)
        auth_check(name, write=True)
        info = model_info(name)
    except Exception as error:  # of the hub, the network or a proxy
        raise OutputError(_reason(error, name)) from error
    files = {file.rfilename for file in info.siblings or []} - {".gitattributes", "README.md"}
    if files and TAG not in (info.tags or []):
        raise OutputError(f"{url} holds a model that hasslefree did not write; choose another name")
    if private and not info.private:
        raise OutputError(
            f"{url} is public: make it private in its settings, or leave out"
            f" {option('private', True)}"
        )


def upload(folder: Path, name: str) -> str:
    """Upload a folder to a repository that `prepare_push` has checked."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8")
    shown = SHOWN.search(text)
    if shown is not None:
        before, _, after = shown.groups()
        text = text.replace(shown[0], f"{before}{name}{after}")
    rewrite(card, text)
    later = (
        f"{folder} is complete; upload it with"
        f" {shlex.join(['hf', 'upload', name, str(folder), '--delete', '*'])}"
    )
    try:
        done = upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload model", delete_patterns="*"
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; {later}") from None
    except Exception as error:  # as above, and of the library that transfers large files
        raise OutputError(f"not uploaded: {_reason(error, name)}. {later}") from error
    return str(done.repo_url)


def _reason(error: Exception, name: str) -> str:
    """The cause of an error and the remedy, for an error message."""
    tokens = "https://huggingface.co/settings/tokens"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, HFValidationError):
        return (
            "a model on the hub is named USER/NAME, in letters and digits with single - _ ."
            f" between, got {name!r}"
        )
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return (
            f"no valid token of the hub: run `hf auth login` with one that can write, from {tokens}"
        )
    if status in (403, 404):
        return (
            f"your token cannot write to {name}: check the user (`hf auth whoami`) and the rights"
            f" ({tokens})"
        )
    return (
        f"the hub failed ({str(error).strip().partition(chr(10))[0]}); check the network, and try"
        " again later"
    )
