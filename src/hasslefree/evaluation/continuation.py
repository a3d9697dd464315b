"""Let a compressed model and its dense original continue a prompt, and measure how fast they
write.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import TextStreamer

from hasslefree.checkpoint.entries import QUANT_METHOD, read_entries
from hasslefree.checkpoint.record import read_record
from hasslefree.errors import CheckpointError, ModelError, PromptError, option
from hasslefree.files import stored_tensors, weight_files
from hasslefree.models.load import (
    check_dtype,
    check_ids,
    load_config,
    load_model,
    loading,
    most_positions,
    quantization,
    resolve_device,
)
from hasslefree.models.names import folder_of
from hasslefree.models.tokenizer import encode, load_tokenizer, surrounding_tokens
from hasslefree.packed.linear import compressed_layers
from hasslefree.planning.machine import free_memory
from hasslefree.validation import Checked, Figure, Positive, Seed

logger = logging.getLogger(__name__)

# Settings of a generation_config.json that select another search, and their values for generation
# token by token.
PLAIN: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "use_mtp": False,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "max_time": None,
}


@dataclass(frozen=True)
class Sampling(Checked):
    """The settings with which a model continues a text.

    Args:
        max_new_tokens: the maximum length; the model may end the text earlier.
        temperature: 0 takes the most probable token each time; above 0, the model's own top_k and
            top_p apply too.
    """

    max_new_tokens: Positive = 64
    temperature: Figure = 0.0
    seed: Seed = 0


@dataclass(frozen=True)
class Continuation:
    """The text that a model generated.

    Args:
        tokens: the token ids.
        seconds: the time from the first token to the last.
    """

    text: str
    tokens: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """The speed after the first token, without reading the prompt; None for a single token."""
        if len(self.tokens) < 2:
            return None
        return (len(self.tokens) - 1) / self.seconds


@dataclass(frozen=True)
class Writer:
    """A loaded model and its tokenizer. name: as the user gave it.

    The model generates token by token: its generation_config selects no other search.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any

    @classmethod
    def load(cls, name: str, **options: Any) -> "Writer":
        """Load a model. options: dtype, device and trust_remote_code, as for `load_model`."""
        tokenizer = load_tokenizer(name, options.get("trust_remote_code", False))
        model = load_model(name, **options)
        search_plainly(model.generation_config, name)
        return cls(name, model, tokenizer)

    @property
    def bytes(self) -> int:
        """Memory of the weights in bytes, including what backends hold."""
        held = sum(layer.held_bytes for layer in compressed_layers(self.model).values())
        return int(self.model.get_memory_footprint()) + held

    def write(
        self,
        prompt: str | Tensor,
        sampling: Sampling,
        show: Callable[[str], None] = lambda text: None,
        special_tokens: bool = True,
    ) -> Continuation:
        """Continue a text or token ids (1, length).

        Args:
            show: called with each piece of text once its words are complete.
            special_tokens: as for `encode`.

        Raises:
            PromptError: the prompt is empty, or too long for the model.
            ModelError: the prompt has ids outside the model's vocabulary.
        """
        limit = most_positions(self.model)
        if isinstance(prompt, str):
            prompt = encode(self.tokenizer, prompt, None, special_tokens)[None]
            if special_tokens:  # a prompt does not end a text
                _, last = surrounding_tokens(self.tokenizer)
                prompt = prompt[:, : prompt.shape[1] - len(last)]
        length = prompt.shape[1]
        if not length:
            raise PromptError("the prompt is empty; give some text to continue")
        if limit is not None and length + sampling.max_new_tokens > limit:
            raise PromptError(
                f"the prompt has {length} tokens and {sampling.max_new_tokens} new ones may"
                f" follow, but the model takes at most {limit} in total; shorten the prompt, or"
                f" lower {option('max_new_tokens')}"
            )
        check_ids(self.model, prompt, self.tokenizer)
        stream = _Stream(self.tokenizer, show)
        ids = prompt.to(self.model.device)
        torch.manual_seed(sampling.seed)
        generate: Any = self.model.generate
        with loading(
            f"{self.name} could not write text",
            "correct its generation_config.json, or download it again",
        ):
            generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=stream,
                tokenizer=self.tokenizer,  # stop_strings need it
                max_new_tokens=sampling.max_new_tokens,
                do_sample=sampling.temperature > 0,
                temperature=sampling.temperature or None,
            )
            text = self.tokenizer.decode(stream.tokens, skip_special_tokens=True)
        return Continuation(text, tuple(stream.tokens), stream.times[-1] - stream.times[0])


def search_plainly(settings: GenerationConfig | None, name: str) -> None:
    """Make a model generate token by token, with a warning for each setting of another search.

    Args:
        settings: generation settings of the model, changed in place.
        name: of the model.
    """
    for setting, plain in PLAIN.items():
        value = getattr(settings, setting, None)
        if value and value != plain:
            logger.warning(
                "texts are written token by token, without the %s %r of the generation_config.json"
                " of %s",
                setting,
                value,
                name,
            )
            setattr(settings, setting, plain)


class _Stream(TextStreamer):
    """A streamer that shows text by whole words, and records the tokens and their times."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Takes the prompt (1, length), and then each token (1,)."""
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            self.tokens += value.tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.show(text)


# Value of --dense for the model that `dense_original` finds.
ORIGINAL = "original"


def dense_original(folder: Path, instead: str = "--dense") -> Path:
    """Find the local folder of the dense model that compression.json names.

    Args:
        folder: of the compressed model.
        instead: the option that names another dense model, for messages.

    Raises:
        ModelError: it is not named there, or not on this machine.
    """
    if not (folder / "compression.json").is_file():
        raise ModelError(
            f"{folder} has no compression.json, which would name the dense model; give that with"
            f" {instead}"
        )
    try:
        record = read_record(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or give the dense one with {instead}") from None
    if record.from_memory:
        raise ModelError(
            f"the dense model was given from memory and may differ from {record.model}; name a"
            f" dense model with {instead}"
        )
    local = find_local_model(record.model)
    if local is None:
        raise ModelError(
            f"the dense model {record.model} was not found from this folder or in the cache of the"
            f" hub; name it with {instead}"
        )
    return local


def find_local_model(name: str) -> Path | None:
    """Find the folder of a model with weights, here or in the cache of the hub; None if there is
    none. Nothing is downloaded.
    """
    folder = folder_of(name)
    if folder is not None and any(folder.glob("*.safetensors")):
        return folder
    return None


def fit_together(
    names: Iterable[str],
    tokens: int,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> bool:
    """Return whether models, and their logits, fit in the device's memory together.

    Models that are not on this machine do not count.

    Args:
        tokens: number of tokens at a time.
        dtype, device, trust_remote_code: as for `load_model`.
    """
    check_dtype(dtype)
    needed = 0
    for name in names:
        folder = find_local_model(name)
        if folder is not None:
            config = load_config(str(folder), trust_remote_code)
            vocabulary = config.get_text_config(decoder=True).vocab_size
            logits = 4 * tokens * vocabulary  # in float32
            needed += loaded_bytes(folder, dtype) + decoded_bytes(config) + logits
    return needed <= free_memory(resolve_device(device))


def loaded_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a model's weights in a dtype; "auto" for the dtype of its files."""
    total = 0
    for tensor in stored_tensors(weight_files(folder)).values():
        meta = tensor.meta
        if dtype != "auto" and meta.is_floating_point():
            meta = meta.to(getattr(torch, dtype))
        total += meta.nbytes
    return total


def decoded_bytes(config: Any) -> int:
    """Bytes of the decoded codes of entropy-coded layers, which are held beside their streams."""
    settings = quantization(config)
    if settings.get("quant_method") != QUANT_METHOD:
        return 0
    total = 0
    for entry in read_entries(settings["modules"]).values():
        if entry.spec.grid is not None and entry.spec.grid.rate is not None:
            total += entry.spec.dense_parameters
    return total
