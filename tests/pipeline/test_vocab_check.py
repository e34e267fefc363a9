"""`drafthead vocab-check` on folders as they lie on a disk."""

import json
from pathlib import Path

import pytest
from drafthead.pipeline.vocab_check import check_vocabularies, read_vocabulary
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.conftest import CommandLine

TOKENS = ("<s>", "</s>", "<unk>", "<x>", "<y>", *"abcdefgh", "Ġ", "Ġa")


def write_model(folder: Path, *, eos: str = "</s>", add_bos: bool = False, rows: int = 15, last: str = "Ġa") -> Path:
    """A model's folder without weights: a byte-level tokenizer of 15 tokens and a config."""
    ids = {token: number for number, token in enumerate([*TOKENS[:-1], last])}
    tokenizer = Tokenizer(models.BPE(ids, [("Ġ", last[-1])], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, unk_token="<unk>"
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
    return folder


def test_the_same_vocabulary_can_draft(drafthead: CommandLine, tmp_path: Path) -> None:
    write_model(tmp_path / "target")
    write_model(tmp_path / "draft")
    done = drafthead("vocab-check", "--target", "target", "--draft", "draft", "--json")
    assert done.code == 0
    report = done.json()
    assert (report["ok"], report["failures"]) == (True, [])
    assert report["target"]["type"] == "byte-level BPE"
    assert report["vllm"]["same_size"]
    assert report["vllm"]["shared_tokens"] == 15
    assert "use_heterogeneous_vocab" not in report["vllm"]["speculative_config"]


def test_the_rules_that_fail_are_named_and_exit_1(drafthead: CommandLine, tmp_path: Path) -> None:
    write_model(tmp_path / "target")
    write_model(tmp_path / "draft", eos="<x>", add_bos=True, last="Ġb")
    done = drafthead("vocab-check", "--target", "target", "--draft", "draft", "--json")
    assert done.code == 1
    found = {one["rule"]: (one["target"], one["draft"]) for one in done.json()["failures"]}
    assert found == {"eos_id": (1, 3), "add_bos": (False, True), "token_texts": ("Ġa", "Ġb")}
    shown = drafthead("vocab-check", "--target", "target", "--draft", "draft").stdout
    assert "token 14 is 'Ġa' in the target, 'Ġb' in the draft model; 1 of 10 differ" in shown


def test_a_padded_table_can_draft_but_vllm_wants_the_option(tmp_path: Path) -> None:
    report = check_vocabularies(str(write_model(tmp_path / "a")), str(write_model(tmp_path / "b", rows=128)))
    assert report["ok"]
    assert not report["vllm"]["same_size"]
    assert report["vllm"]["speculative_config"]["use_heterogeneous_vocab"] is True
    assert report["vllm"]["shared_of_draft"] == 15 / 128


def test_types_are_told_apart(tmp_path: Path) -> None:
    bytes_ = {f"<0x{value:02X}>": 3 + value for value in range(256)}
    tokenizers = {
        "SentencePiece BPE": Tokenizer(models.BPE({"<unk>": 0, "a": 1, **bytes_}, [], byte_fallback=True)),
        "Unigram": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
        "WordPiece": Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    }
    for name, tokenizer in tokenizers.items():
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / name)
        assert read_vocabulary(tmp_path / name).type == name


@pytest.mark.parametrize("missing", ["no folder", "no tokenizer", "torn tokenizer", "bad size"])
def test_bad_folders_are_one_line(drafthead: CommandLine, tmp_path: Path, missing: str) -> None:
    write_model(tmp_path / "target")
    if missing != "no folder":
        write_model(tmp_path / "draft", rows=-1 if missing == "bad size" else 15)
    if missing == "no tokenizer":
        (tmp_path / "draft" / "tokenizer.json").unlink()
        (tmp_path / "draft" / "tokenizer_config.json").unlink()
    if missing == "torn tokenizer":
        (tmp_path / "draft" / "tokenizer.json").write_text('{"version": "1.0", "mod')
    done = drafthead("vocab-check", "--target", "target", "--draft", "draft")
    assert done.code == 2
    (complaint,) = done.complaints
    assert "draft" in complaint
