"""Which target tokens a head can draft (`VocabGate`).

A head scores `U` draft tokens instead of the target's `V`. vLLM reads the map as offsets: draft id `i` is
target id `i + d2t[i]` (vllm/model_executor/models/llama_eagle3.py), so ids are sorted and offsets never fall.

Shapes: U draft vocabulary, V target vocabulary.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import write_atomically
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
PLACEHOLDER = re.compile(r"unused|reserved", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The map between draft and target ids."""

    d2t: Tensor
    """[U] int64: target id minus draft id."""
    t2d: Tensor
    """[V] bool: whether the target token can be drafted."""

    @property
    def size(self) -> int:
        return len(self.d2t)

    def target_ids(self) -> Tensor:
        """Return the [U] target ids, in the order of the head's logits."""
        return torch.arange(self.size) + self.d2t

    def coverage(self, counts_V: Tensor) -> float:
        """Return the part of the counted tokens that can be drafted; 0 if none were counted."""
        total = int(counts_V.sum())
        return int(counts_V[self.t2d].sum()) / total if total else 0.0

    def check(self, *, tokenizer_size: int, always: Iterable[int]) -> None:
        """Hold the map against what the head and vLLM rely on.

        Raises:
            GateError: `VocabGate`, naming the tensor that is wrong.
        """
        _check_form(self)
        target_ids_U = self.target_ids()
        if (self.d2t.diff() < 0).any() or int(target_ids_U[0]) < 0:
            raise GateError("VocabGate", "d2t", "target ids are not strictly increasing from 0 on")
        limit = len(self.t2d) if self.size == len(self.t2d) else min(tokenizer_size, len(self.t2d))
        if int(target_ids_U[-1]) >= limit:
            raise GateError("VocabGate", "d2t", f"target id {int(target_ids_U[-1])} is not below {limit}")
        if not torch.equal(self.t2d.nonzero().flatten(), target_ids_U):
            raise GateError("VocabGate", "t2d", "marks other tokens than d2t leads to")
        missing = sorted(token for token in set(always) if not self.t2d[token])
        if missing:
            raise GateError("VocabGate", "t2d", f"special tokens {missing} cannot be drafted")

    def save(self, path: Path) -> None:
        tensors = {"d2t": self.d2t.contiguous(), "t2d": self.t2d.contiguous()}
        write_atomically(path, lambda temporary: save_file(tensors, temporary))

    @classmethod
    def load(cls, path: Path) -> "DraftVocab":
        """Read a saved map.

        Raises:
            InputError: No such file, or it does not hold d2t and t2d.
        """
        try:
            tensors = load_file(path)
            return cls(d2t=tensors["d2t"], t2d=tensors["t2d"])
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; run the draft-vocab stage first") from None
        except (SafetensorError, KeyError) as error:
            raise InputError(f"{path}: holds no draft vocabulary ({error}); run draft-vocab again") from None


def _check_form(vocab: DraftVocab) -> None:
    if vocab.d2t.dtype != torch.int64 or vocab.d2t.ndim != 1 or not vocab.size:
        raise GateError("VocabGate", "d2t", f"{vocab.d2t.dtype} {list(vocab.d2t.shape)}, expected int64 [U]")
    if vocab.t2d.dtype != torch.bool or vocab.t2d.ndim != 1:
        raise GateError("VocabGate", "t2d", f"{vocab.t2d.dtype} {list(vocab.t2d.shape)}, expected bool [V]")
    marked = int(vocab.t2d.sum())
    if marked != vocab.size:
        raise GateError("VocabGate", "t2d", f"marks {marked} tokens, d2t has {vocab.size}")


def build(
    counts_V: Tensor, size: int, tokenizer_size: int, always: Iterable[int], single_bytes: Iterable[int] = ()
) -> DraftVocab:
    """Choose `size` target tokens to draft.

    First the `always` tokens; then the single-byte ones if all of them fit beside these; then the most
    frequent; then the lowest ids that are left, below `tokenizer_size` (a target's vocabulary may be padded
    beyond it). The whole vocabulary gives the identity.

    Args:
        counts_V: How often each target token is supervised.

    Raises:
        InputError: `draft_vocab.size` cannot be met.
    """
    num_target = len(counts_V)
    check_size(size, tokenizer_size, num_target)
    limit = min(tokenizer_size, num_target)
    if size == num_target:
        return DraftVocab(torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool))
    chosen = _within(always, limit)
    if len(chosen) > size:
        raise InputError(f"draft_vocab.size={size}: the {len(chosen)} special tokens need more room")
    target_ids_U = torch.tensor(sorted(_fill(chosen, _within(single_bytes, limit), counts_V[:limit], size)))
    t2d_V = torch.zeros(num_target, dtype=torch.bool)
    t2d_V[target_ids_U] = True
    return DraftVocab(target_ids_U - torch.arange(size), t2d_V)


def check_size(size: int, tokenizer_size: int, num_target: int) -> None:
    """Refuse a draft vocabulary that the target cannot have.

    Raises:
        InputError: Naming `draft_vocab.size` and what it may be.
    """
    limit = min(tokenizer_size, num_target)
    if size != num_target and not 0 < size <= limit:
        raise InputError(
            f"draft_vocab.size={size}: give 1 to {limit} (tokens of the target's tokenizer) "
            f"or {num_target} (all of its embeddings)"
        )


def _within(ids: Iterable[int], limit: int) -> set[int]:
    return {token for token in ids if 0 <= token < limit}


def _fill(chosen: set[int], single_bytes: set[int], counts_L: Tensor, size: int) -> set[int]:
    if len(chosen | single_bytes) <= size:
        chosen = chosen | single_bytes
    # stable: equal counts, zeros among them, stay in the order of their ids
    ranked = counts_L.argsort(descending=True, stable=True).tolist()
    free = (token for token in ranked if token not in chosen)
    return chosen | {token for token, _ in zip(free, range(size - len(chosen)), strict=False)}


# ---- tokens of a tokenizer -------------------------------------------------------------------------------


def special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of special and added tokens (end of turn, think, tool tags) without reserved placeholders."""
    added = {
        int(token): str(text)
        for token, text in tokenizer.added_tokens_decoder.items()
        if not PLACEHOLDER.search(str(text))
    }
    return sorted(added.keys() | {int(token) for token in tokenizer.all_special_ids if token is not None})


def single_byte_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of tokens that stand for one byte, with which every text can be written."""
    alphabet = set(ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab()
    return sorted(id for token, id in vocabulary.items() if token in alphabet or BYTE_TOKEN.fullmatch(token))
