"""Public texts on the hub, and how their perplexity is measured."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError

from hasslefree.errors import CalibrationError, option

# Timeout in seconds of a request that tests whether the hub, or a model on it, is reachable.
PATIENCE = 5
_PTB = "hf://datasets/ptb-text-only/ptb_text_only@refs%2Fconvert%2Fparquet/penn_treebank/{}/0000.parquet"


@dataclass(frozen=True)
class Protocol:
    """How a perplexity is measured; two of them are comparable only under the same protocol.

    Args:
        joiner: the separator of two documents.
        documents: the number of documents, from the first on; None for all.
        windows: the number of windows, from the first on; None for all.
        remainder: also score the last window if the tokens do not fill it.
        special_tokens: let the tokenizer add its special tokens, such as <bos>, once for the whole
            text.
        first_token: replace the start of every window by the tokens that the tokenizer puts before
            a text, as llama.cpp does. SparseGPT's code does not.
    """

    joiner: str = "\n\n"
    documents: int | None = None
    windows: int | None = None
    remainder: bool = True
    special_tokens: bool = True
    first_token: bool = True


# The protocol of texts without published figures.
FEW = Protocol(documents=1100, windows=256)


@dataclass(frozen=True)
class HubText:
    """A public text on the hub.

    Args:
        calibration, evaluation: the arguments of `datasets.load_dataset` for each use.
        protocol: how the perplexity is measured.
        field: the field of a row that holds the text, or the messages of a conversation.
        lines: the rows are lines of a single document.
    """

    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    protocol: Protocol = FEW
    field: str = "text"
    lines: bool = False


_C4 = {"path": "allenai/c4", "split": "train"}
_WIKITEXT2 = {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"}
_WIKIPEDIA = {
    "path": "wikimedia/wikipedia",
    "data_files": "20231101.en/train-00000-of-*.parquet",
}
_CODE = {"path": "codeparrot/codeparrot-clean-valid"}
_CHAT = {"path": "HuggingFaceH4/ultrachat_200k", "split": "train"}
_LANGUAGE = "multilingual/c4-{}-validation.tfrecord-0000{}-of-*.json.gz"


def language_files(number: int) -> list[str]:
    """The validation files of this number in C4's German, Spanish, French, Russian and Chinese."""
    return [_LANGUAGE.format(language, number) for language in ("de", "es", "fr", "ru", "zh")]


HUB_TEXTS = {
    # The texts and protocols of SparseGPT's experiments (arXiv 2301.00774), which the paper's
    # public code shares: only whole windows; for C4, the first shard for calibration, and 256
    # windows of the first 1,100 validation documents for evaluation.
    "c4": HubText(
        _C4 | {"data_files": "en/c4-train.00000-of-01024.json.gz"},
        _C4 | {"data_files": "en/c4-validation.00000-of-00008.json.gz"},
        Protocol(joiner=" ", documents=1100, windows=256, remainder=False),
    ),
    "wikitext2": HubText(
        _WIKITEXT2 | {"split": "train"},
        _WIKITEXT2 | {"split": "test"},
        Protocol(remainder=False),
        lines=True,
    ),
    "ptb": HubText(
        {"path": "parquet", "data_files": _PTB.format("train"), "split": "train"},
        {"path": "parquet", "data_files": _PTB.format("test"), "split": "train"},
        Protocol(joiner=" ", remainder=False),
        field="sentence",
        lines=True,
    ),
    # Texts of other kinds: the parts for calibration and for evaluation do not overlap.
    "wikipedia": HubText(
        _WIKIPEDIA | {"split": "train[:90%]"},
        _WIKIPEDIA | {"split": "train[90%:]"},
    ),
    "code": HubText(
        _CODE | {"split": "train[:90%]"},
        _CODE | {"split": "train[90%:]"},
        field="content",
    ),
    "chat": HubText(
        _CHAT | {"data_files": "data/train_sft-00000-of-*.parquet"},
        _CHAT | {"data_files": "data/test_sft-00000-of-*.parquet"},
        field="messages",
    ),
    "languages": HubText(
        _C4 | {"data_files": language_files(0)},
        _C4 | {"data_files": language_files(1)},
    ),
}


@cache
def is_reachable(minute: int) -> bool:
    """Return True if the hub answers. The result is cached for each minute, since a connection may
    come back while a notebook is open.
    """
    try:
        get_hf_file_metadata(
            hf_hub_url("allenai/c4", "README.md", repo_type="dataset"), timeout=PATIENCE
        )
    except HfHubHTTPError:
        return True
    except Exception:  # raised by the network or a proxy
        return False
    return True


def documents_on_hub(name: str, split: dict[str, Any]) -> Any:
    """Read one of `HUB_TEXTS` from the hub, or from the cache if the hub cannot be reached.

    Args:
        split: the arguments of `datasets.load_dataset`.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    if not is_reachable(int(time.monotonic() // 60)):
        datasets.config.HF_HUB_OFFLINE = True  # else each request is retried for half a minute
    try:
        return datasets.load_dataset(**split)[HUB_TEXTS[name].field]
    except Exception as error:  # the network, the hub or the file's reader may raise anything
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, ConnectionError):
            cause = "no connection"
        raise CalibrationError(
            f"the text {name!r} could not be downloaded from the hub ({cause}); give a local .txt"
            " or .jsonl file, or, to compress, let the model write the text"
            f" ({option('calibration', 'self')})"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
