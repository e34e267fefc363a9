"""The draft vocabulary's edges (C7) and its gate."""

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab, build, single_byte_ids, special_ids
from drafthead.data.errors import GateError, InputError

from .templates import TAGS, make_tokenizer

V, TOKENIZER_SIZE = 512, 500
ALWAYS = [490, 491, 492, 499]
SINGLE_BYTES = list(range(100, 200))


def make_counts():
    """40 distinct tokens, the frequent ones high up; none is special or a single byte."""
    counts = torch.zeros(V, dtype=torch.int64)
    counts[440:480] = torch.arange(1, 41)
    return counts


def build_256():
    return build(make_counts(), 256, TOKENIZER_SIZE, ALWAYS, SINGLE_BYTES)


def test_exact_size_sorted_and_below_the_tokenizer():
    vocab = build_256()
    ids = vocab.target_ids()
    assert int(vocab.t2d.sum()) == len(vocab.d2t) == 256
    assert (vocab.d2t.dtype, vocab.t2d.dtype, vocab.t2d.shape) == (torch.int64, torch.bool, (V,))
    assert (ids.diff() > 0).all()
    assert int(ids.max()) < TOKENIZER_SIZE
    assert torch.equal(vocab.t2d.nonzero().flatten(), ids)
    vocab.check(tokenizer_size=TOKENIZER_SIZE, always=ALWAYS)


def test_special_and_single_byte_tokens_are_in_though_the_data_lacks_them():
    assert set(ALWAYS) | set(SINGLE_BYTES) | set(range(440, 480)) <= set(build_256().target_ids().tolist())


def test_padding_takes_the_lowest_unused_ids():
    rest = set(build_256().target_ids().tolist()) - set(ALWAYS) - set(SINGLE_BYTES) - set(range(440, 480))
    unused = [i for i in range(TOKENIZER_SIZE) if i not in SINGLE_BYTES]
    assert sorted(rest) == unused[: 256 - 4 - 100 - 40]


def test_the_most_frequent_come_first_and_bytes_stay_out_when_they_do_not_fit():
    ids = set(build(make_counts(), 20, TOKENIZER_SIZE, ALWAYS, SINGLE_BYTES).target_ids().tolist())
    assert ids == set(ALWAYS) | set(range(464, 480))


def test_coverage_is_of_supervised_tokens():
    counts = make_counts()
    assert build_256().coverage(counts) == 1.0
    small = build(counts, 20, TOKENIZER_SIZE, ALWAYS)
    assert small.coverage(counts) == pytest.approx(sum(range(25, 41)) / sum(range(1, 41)))
    assert small.coverage(torch.zeros(V, dtype=torch.int64)) == 0.0


def test_the_whole_vocabulary_is_the_identity():
    vocab = build(make_counts(), V, TOKENIZER_SIZE, ALWAYS)
    assert torch.equal(vocab.target_ids(), torch.arange(V))
    assert not vocab.d2t.any()
    assert vocab.t2d.all()
    vocab.check(tokenizer_size=TOKENIZER_SIZE, always=ALWAYS)


def test_the_whole_tokenizer_of_a_padded_target_round_trips():
    vocab = build(make_counts(), TOKENIZER_SIZE, TOKENIZER_SIZE, ALWAYS)
    assert torch.equal(vocab.target_ids(), torch.arange(TOKENIZER_SIZE))
    assert vocab.t2d.tolist() == [True] * TOKENIZER_SIZE + [False] * (V - TOKENIZER_SIZE)
    vocab.check(tokenizer_size=TOKENIZER_SIZE, always=ALWAYS)


@pytest.mark.parametrize("size", [600, 513, 501, 0, -1])
def test_impossible_sizes_are_refused_by_name(size):
    with pytest.raises(InputError, match=rf"draft_vocab\.size={size}: give 1 to 500 .* or 512"):
        build(make_counts(), size, TOKENIZER_SIZE, ALWAYS)


def test_special_tokens_need_room():
    with pytest.raises(InputError, match=r"draft_vocab\.size=3: the 4 special tokens"):
        build(make_counts(), 3, TOKENIZER_SIZE, ALWAYS)
    assert build(make_counts(), 4, TOKENIZER_SIZE, ALWAYS).target_ids().tolist() == ALWAYS


def test_ids_are_sorted_whatever_the_order_of_the_special_tokens():
    assert build(make_counts(), 5, TOKENIZER_SIZE, [499, 8, 1, 3]).target_ids().tolist() == [
        1,
        3,
        8,
        479,
        499,
    ]


def test_saved_maps_load_again(tmp_path):
    vocab = build_256()
    vocab.save(tmp_path / "vocab.safetensors")
    again = DraftVocab.load(tmp_path / "vocab.safetensors")
    assert torch.equal(again.d2t, vocab.d2t)
    assert torch.equal(again.t2d, vocab.t2d)
    with pytest.raises(InputError, match="no such file"):
        DraftVocab.load(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="holds no draft vocabulary"):
        DraftVocab.load(tmp_path / "bad.safetensors")


def moved(t2d, old, new):
    t2d = t2d.clone()
    t2d[old], t2d[new] = False, True
    return t2d


@pytest.mark.parametrize(
    ("fault", "field", "problem"),
    [
        (lambda v: DraftVocab(v.d2t.int(), v.t2d), "d2t", "expected int64"),
        (lambda v: DraftVocab(v.d2t, v.t2d.int()), "t2d", "expected bool"),
        (lambda v: DraftVocab(v.d2t[:-1], v.t2d), "t2d", "marks 256 tokens, d2t has 255"),
        (lambda v: DraftVocab(v.d2t.flip(0), v.t2d), "d2t", "strictly increasing"),
        (lambda v: DraftVocab(v.d2t - 1, v.t2d), "d2t", "strictly increasing"),
        (lambda v: DraftVocab(v.d2t + 5, v.t2d), "d2t", "target id 504 is not below 500"),
        (lambda v: DraftVocab(v.d2t, moved(v.t2d, 100, 439)), "t2d", "other tokens"),
    ],
    ids=["d2t-dtype", "t2d-dtype", "length", "order", "negative", "beyond-tokenizer", "disagree"],
)
def test_gate_refuses(fault, field, problem):
    with pytest.raises(GateError, match=f"^VocabGate: {field}: .*{problem}"):
        fault(build_256()).check(tokenizer_size=TOKENIZER_SIZE, always=ALWAYS)


def test_gate_misses_special_tokens():
    with pytest.raises(GateError, match=r"special tokens \[498\]"):
        build_256().check(tokenizer_size=TOKENIZER_SIZE, always=[*ALWAYS, 498])


def test_tokens_of_a_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|reserved_7|>", "<unused0>"])
    names = tokenizer.convert_ids_to_tokens(special_ids(tokenizer))
    assert sorted(names) == sorted([*TAGS, "<|im_start|>", "<|im_end|>"])
    single = single_byte_ids(tokenizer)
    assert len(single) == 256
    assert tokenizer.encode("\n")[0] in single
