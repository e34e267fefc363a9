"""The draft tokens that a micro batch's loss looks at: what a set holds, and on what it depends."""

import torch
from drafthead.data.batches import Pack
from drafthead.data.encoding import Row
from drafthead.pipeline.heads.base import FrozenTarget
from drafthead.pipeline.loss_vocab import LossVocab, by_frequency
from torch import Tensor

VOCAB, SIZE = 400, 40


def make_frozen(target_ids_U: Tensor) -> FrozenTarget:
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(VOCAB, 8, generator=generator)
    return FrozenTarget(weight_VD, torch.ones(8), weight_VD, target_ids_U, 1e-5)


def make_row(context: list[int], answer: list[int]) -> Row:
    return Row(
        id="row",
        source="any",
        domain="any",
        turn=0,
        input_ids=context + answer,
        context_length=len(context),
        clipped=False,
    )


def make_pack(context: list[int], answer: list[int]) -> Pack:
    tokens = context + answer
    states = torch.zeros(len(tokens), 8)
    return Pack(
        tokens_T=torch.tensor(tokens),
        aux_TAD=states[:, None],
        last_TD=states,
        position_T=torch.arange(len(tokens)),
        supervised_T=torch.arange(len(tokens)) >= len(context),
        documents=[(0, len(tokens))],
    )


DRAFTABLE_U = torch.arange(0, VOCAB, 2)
# of the even tokens 0, 2, ... 20 is written most often, then 22, ...; an odd one cannot be drafted
ROWS = [make_row([3, 4], [20] * 9 + [22] * 8 + [24] * 7 + [7] * 50 + [26, 28, 30, 32, 34, 36, 38] * 3)]


def test_tokens_by_how_often_the_target_wrote_them() -> None:
    assert by_frequency(ROWS, DRAFTABLE_U, VOCAB)[:12].tolist() == [20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 0, 2]


def test_a_set_holds_frequent_tokens_those_of_the_answers_and_others() -> None:
    vocab = LossVocab(make_frozen(DRAFTABLE_U), ROWS, SIZE, seed=0)
    ids = vocab.ids(make_pack([300, 302], [20, 310, 312, 312, 311]))
    assert len(ids) == SIZE
    assert ids.tolist() == sorted(set(ids.tolist()) & set(DRAFTABLE_U.tolist()))
    assert {20, 22, 24, 26, 28, 30, 32, 34, 36, 38} | {310, 312} <= set(ids.tolist())


def test_more_tokens_in_the_answers_than_a_set_has_room_for() -> None:
    vocab = LossVocab(make_frozen(DRAFTABLE_U), ROWS, SIZE, seed=0)
    written = list(range(100, 300, 2))
    ids = vocab.ids(make_pack([3], written))
    assert len(ids) == SIZE
    assert len(set(ids.tolist()) & set(written)) == SIZE - SIZE // 4


def test_a_set_depends_on_the_micro_batch_and_the_seed_alone() -> None:
    frozen = make_frozen(DRAFTABLE_U)
    one, again = (LossVocab(frozen, ROWS, SIZE, seed=0) for _ in range(2))
    first, second = make_pack([3], [20, 22]), make_pack([5], [20, 22])
    drawn = one.ids(first)
    one.ids(second)
    torch.manual_seed(99)
    assert torch.equal(one.ids(first), drawn)
    assert torch.equal(again.ids(first), drawn)
    assert not torch.equal(one.ids(second), drawn)
    assert not torch.equal(LossVocab(frozen, ROWS, SIZE, seed=1).ids(first), drawn)


def test_every_token_has_its_turn() -> None:
    vocab = LossVocab(make_frozen(DRAFTABLE_U), ROWS, SIZE, seed=0)
    counts_V = torch.zeros(VOCAB)
    for number in range(VOCAB):
        counts_V[vocab.ids(make_pack([number], [20]))] += 1
    drawn = counts_V[vocab.others]
    # 30 of the 190 others in each of 400 sets: 63 times each, give or take 7
    assert float(drawn.min()) > 35
    assert float(drawn.max()) < 95


def test_the_target_of_a_micro_batch_has_the_rows_of_its_set() -> None:
    frozen = make_frozen(DRAFTABLE_U)
    vocab, pack = LossVocab(frozen, ROWS, SIZE, seed=0), make_pack([3], [20, 50])
    fewer = vocab.of(pack)
    assert fewer.is_restricted
    assert torch.equal(fewer.target_ids_U, vocab.ids(pack))
    assert torch.equal(fewer.lm_head_UD, frozen.embedding_VD[fewer.target_ids_U])
    assert not frozen.is_restricted
