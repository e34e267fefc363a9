"""Can this draft model serve this target?

    drafthead vocab-check --target DIR --draft DIR

Two answers: by the rules that keep drafts meaningful (`data/vocab_match.py`), which decide the exit code, and by what
vLLM itself asks for, with the object for `--speculative-config`.
"""

import json
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.data.vocab_match import Vocabulary, find_mismatches, shared_tokens
from drafthead.pipeline.target import open_target
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNREADABLE = (OSError, ValueError, KeyError, TypeError, ImportError)
FEW_SHARED = 100
"""Below this many common tokens vLLM warns."""


def check_vocabularies(target: str, draft: str) -> dict[str, Any]:
    """Compare the vocabularies of two model folders.

    Returns:
        The object of `drafthead vocab-check --json`: `ok`; `failures`, those of `find_mismatches`; what was read of
        `target` and `draft`; `vllm`, what vLLM says of the pair.

    Raises:
        InputError: A folder or its tokenizer cannot be read.
    """
    paths = {"target": find_folder("--target", target), "draft": find_folder("--draft", draft)}
    read = {role: read_vocabulary(path) for role, path in paths.items()}
    failures = find_mismatches(read["target"], read["draft"])
    return {
        "ok": not failures,
        "failures": failures,
        **{role: {"path": str(paths[role]), **_described(one)} for role, one in read.items()},
        "vllm": _vllm(read["target"], read["draft"], paths["draft"]),
    }


def _vllm(target: Vocabulary, draft: Vocabulary, path: Path) -> dict[str, Any]:
    same_size = target.size == draft.size
    shared = len(shared_tokens(target, draft))
    config = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    return {
        "same_size": same_size,
        "target_vocab_size": target.size,
        "draft_vocab_size": draft.size,
        "shared_tokens": shared,
        "shared_of_target": shared / target.size,
        "shared_of_draft": shared / draft.size,
        "speculative_config": config if same_size else {**config, "use_heterogeneous_vocab": True},
    }


def _described(vocabulary: Vocabulary) -> dict[str, Any]:
    names = ("type", "size", "bos_id", "eos_id", "add_bos", "add_eos")
    return {"tokens": len(vocabulary.ids), **{name: getattr(vocabulary, name) for name in names}}


# ---- reading ---------------------------------------------------------------------------------------------


def find_folder(option: str, name: str) -> Path:
    """A model's folder, given by path or as `builtin:`.

    Raises:
        InputError: Naming the option.
    """
    if name.startswith("builtin:"):
        return open_target(name).path
    path = Path(name).expanduser()
    if not path.is_dir():
        raise InputError(f"{option} {name}: no such folder; give a model's folder with its tokenizer")
    return path.resolve()


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read a model folder's tokenizer and the size of its embedding table.

    Raises:
        InputError: It has no tokenizer that can be loaded, or its config cannot be used.
    """
    tokenizer = _load_tokenizer(folder)
    ids = tokenizer.get_vocab()
    if not ids:
        raise InputError(f"{folder}: its tokenizer has no tokens; copy the model's tokenizer files there")
    encoded = tokenizer.encode("a")
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return Vocabulary(
        type=_type(tokenizer),
        ids=ids,
        size=_table_rows(folder) or max(ids.values()) + 1,
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=tokenizer.unk_token_id,
        add_bos=bos_id is not None and encoded[:1] == [bos_id],
        add_eos=eos_id is not None and encoded[-1:] == [eos_id],
        space_prefixes=_space_prefixes(tokenizer),
    )


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    named = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
    if not any((folder / name).is_file() for name in named):
        raise InputError(f"{folder}: no tokenizer there (no {named[0]}); copy the model's tokenizer files there")
    if (folder / named[0]).is_file():
        read_json(folder / named[0])
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # tokenizers raises the bare class for a file that it cannot read
        if type(error) is not Exception and not isinstance(error, UNREADABLE):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{folder}: no tokenizer that can be loaded ({reason[:200]})") from None


def _table_rows(folder: Path) -> int | None:
    """`vocab_size` of the model, which vLLM compares; None for a folder that is a tokenizer alone."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{folder}/config.json: not a JSON object; copy the model's config.json there")
    size = (config.get("text_config") or {}).get("vocab_size", config.get("vocab_size"))
    if size is not None and (not isinstance(size, int) or size < 1):
        raise InputError(f"{folder}/config.json: vocab_size is {size!r}, no whole number from 1 on")
    return size


def _type(tokenizer: PreTrainedTokenizerBase) -> str:
    """How text is cut into tokens, named so that two of one name cut by the same method."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return type(tokenizer).__name__
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    method = str(parts["model"]["type"])
    if method != "BPE":
        return method
    around = json.dumps([parts["pre_tokenizer"], parts["decoder"]])
    if '"ByteLevel"' in around:
        return "byte-level BPE"
    return "SentencePiece BPE" if parts["model"].get("byte_fallback") else "BPE"


def _space_prefixes(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """As vLLM finds them (`_detect_space_prefix`): what stands before the `a` in the first token of " a"."""
    ids = tokenizer.encode(" a", add_special_tokens=False)
    token = tokenizer.convert_ids_to_tokens(ids[0]) if ids else ""
    if len(token) > 1 and token.endswith("a") and token[0] not in " \t":
        return (token[:-1],)
    return ("Ġ", "▁")


# ---- text ------------------------------------------------------------------------------------------------


def render(report: dict[str, Any]) -> str:
    lines = [f"{one['rule']}: {one['message']}" for one in report["failures"]]
    verdict = "can draft for" if report["ok"] else f"cannot draft for ({len(lines)} rules failed)"
    lines.append(f"{report['draft']['path']} {verdict} {report['target']['path']}")
    vllm = report["vllm"]
    sizes = f"vocab_size {vllm['target_vocab_size']} and {vllm['draft_vocab_size']}"
    shared = f"{vllm['shared_tokens']} common tokens ({vllm['shared_of_draft']:.1%} of the draft model's)"
    if vllm["same_size"]:
        lines.append(f"vLLM takes the pair as a draft model: {sizes}; {shared}. It does not compare texts.")
    else:
        few = f", and warns: fewer than {FEW_SHARED}" if vllm["shared_tokens"] < FEW_SHARED else ""
        lines.append(f"vLLM refuses it as it is: {sizes}; with use_heterogeneous_vocab it drafts {shared}{few}.")
    lines.append(f"--speculative-config '{json.dumps(vllm['speculative_config'], separators=(',', ':'))}'")
    return "\n".join(lines)
