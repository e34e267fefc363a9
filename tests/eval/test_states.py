"""Which state a layer id stands for (C9), against a toy whose states are known and against transformers.

Shapes: B batch, T tokens, A captured layers, D hidden.
"""

from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.states import StateRecorder, find_decoder
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

LAYERS, D = 8, 4


class ToyBlock(nn.Module):
    """Adds 2 ** i, so that the state entering layer i is 2 ** i - 1 and no two are alike."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + 2.0**self.number


class ToyNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * -1


class ToyDecoder(nn.Module):
    def __init__(self, by_keyword: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(10, D)
        nn.init.zeros_(self.embed_tokens.weight)
        self.layers = nn.ModuleList(ToyBlock(number) for number in range(LAYERS))
        self.norm = ToyNorm()
        self.by_keyword = by_keyword

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden_states=hidden) if self.by_keyword else layer(hidden)
        normed: Tensor = self.norm(hidden)
        return normed


class ToyTarget(nn.Module):
    def __init__(self, by_keyword: bool = False):
        super().__init__()
        self.model = ToyDecoder(by_keyword)


@pytest.fixture(scope="module")
def llama() -> Any:
    """Six layers, and a final norm that is not the identity's."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        model.model.norm.weight.copy_(torch.rand(32) + 0.5)
    return model


def random_rows(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(40, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("ids", [[2, 4, 5], [0, 3, 8], [7], list(range(9))], ids=str)
def test_an_id_is_the_state_entering_that_layer(ids: list[int], by_keyword: bool) -> None:
    """C9; id 8, the number of layers, and `last` are the state before the final norm, which turns the sign."""
    aux, last = StateRecorder(ToyTarget(by_keyword), ids).forward(torch.tensor([[1, 2, 3]]))
    assert aux.shape == (1, 3, len(ids), D)
    assert aux[0, 0, :, 0].tolist() == [2.0**layer - 1 for layer in ids]
    assert (last == 255).all()


def test_captured_states_are_transformers_hidden_states(llama: Any) -> None:
    ids_BT = torch.tensor(random_rows([7]))
    hidden = llama(input_ids=ids_BT, output_hidden_states=True, use_cache=False).hidden_states
    aux, last = StateRecorder(llama, list(range(7))).forward(ids_BT)
    for layer in range(6):
        assert torch.equal(aux[:, :, layer], hidden[layer])
    assert torch.equal(aux[:, :, 6], last)
    torch.testing.assert_close(llama.model.norm(last), hidden[6])
    assert (last - hidden[6]).abs().max() > 0.1, "transformers' own last entry is behind the norm"


def test_norm_and_lm_head_of_the_last_state_are_the_logits(llama: Any) -> None:
    ids_BT = torch.tensor(random_rows([9]))
    _, last = StateRecorder(llama, [1]).forward(ids_BT)
    logits = llama(input_ids=ids_BT, use_cache=False).logits
    assert (llama.lm_head(llama.model.norm(last)) - logits).abs().max() < 1e-3


def test_rows_of_a_batch_have_the_states_of_single_runs_in_any_order(llama: Any) -> None:
    """A24: padding, neighbours and earlier calls leave no trace."""
    rows = random_rows([5, 12, 1, 8])
    recorder = StateRecorder(llama, [1, 3, 6])
    single = [next(iter(recorder.record([row]))) for row in rows]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        batch = list(recorder.record([rows[number] for number in order]))
        for number, (aux, last) in zip(order, batch, strict=True):
            assert aux.shape == (len(rows[number]), 3, 32)
            torch.testing.assert_close(aux, single[number][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(last, single[number][1], rtol=1e-4, atol=1e-5)
    again = list(recorder.record(rows))
    assert not torch.allclose(again[0][1][:1], again[2][1])


def test_recorded_states_are_copies(llama: Any) -> None:
    """What was yielded must not change with the next pass, nor keep the whole batch in memory."""
    first, second = random_rows([6, 4])
    recorder = StateRecorder(llama, [2])
    aux, last = next(iter(recorder.record([first, second])))
    kept_aux, kept_last = aux.clone(), last.clone()
    recorder.forward(torch.tensor([second]))
    assert torch.equal(aux, kept_aux)
    assert torch.equal(last, kept_last)
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


def test_a_recorder_that_is_gone_leaves_no_hook_behind() -> None:
    """`compare` makes one for each contestant over the same model."""
    target = ToyTarget()
    modules = [*target.model.layers, target.model.norm]
    kept, gone = StateRecorder(target, [1, 3]), StateRecorder(target, [3, 5])
    gone.forward(torch.tensor([[1, 2]]))
    assert [len(module._forward_pre_hooks) for module in modules] == [0, 1, 0, 2, 0, 1, 0, 0, 2]
    del gone
    assert [len(module._forward_pre_hooks) for module in modules] == [0, 1, 0, 1, 0, 0, 0, 0, 1]
    kept.forward(torch.tensor([[1, 2]]))
    assert kept.aux()[0, 0, :, 0].tolist() == [1, 7]


@pytest.mark.parametrize(
    ("wrapper", "names"),
    [("model", ("layers", "norm")), ("transformer", ("h", "ln_f")), ("backbone", ("layers", "norm_f"))],
    ids=["llama", "gpt-2", "mamba"],
)
def test_the_decoder_is_found_under_its_usual_names(wrapper: str, names: tuple[str, str]) -> None:
    decoder, target = nn.Module(), nn.Module()
    layers, norm = nn.ModuleList([nn.Identity()]), nn.Identity()
    decoder.add_module(names[0], layers)
    decoder.add_module(names[1], norm)
    target.add_module(wrapper, decoder)
    assert find_decoder(target) == (decoder, layers, norm)


def test_a_decoder_inside_a_vision_wrapper_is_found() -> None:
    toy, wrapper, target = ToyTarget(), nn.Module(), nn.Module()
    wrapper.add_module("language_model", toy.model)
    target.add_module("model", wrapper)
    assert find_decoder(target)[0] is toy.model


def test_an_unknown_model_lists_its_parts() -> None:
    target = nn.Sequential()
    target.add_module("stem", nn.Identity())
    target.add_module("trunk", nn.Identity())
    with pytest.raises(InputError, match=r"Sequential \(parts: stem, trunk\)"):
        find_decoder(target)


def test_a_shared_opening_changes_nothing(llama: Any) -> None:
    opening = random_rows([7])[0]
    rows = [opening + rest for rest in random_rows([1, 9, 4])]
    recorder, plain = StateRecorder(llama, [0, 2, 5]), StateRecorder(llama, [0, 2, 5])
    recorder.share_opening(opening)
    assert recorder.opening is not None
    for found, expected in zip(recorder.record(rows), plain.record(rows), strict=True):
        for state, other in zip(found, expected, strict=True):
            torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", [[1, 2, 3], [1, 2, 4, 5]], ids=["nothing behind it", "begins otherwise"])
def test_a_row_without_the_opening_is_refused(llama: Any, row: list[int]) -> None:
    recorder = StateRecorder(llama, [2])
    recorder.share_opening([1, 2, 3])
    with pytest.raises(ValueError, match="does not go on behind the 3 tokens"):
        list(recorder.record([row]))


def test_a_sliding_window_shares_nothing() -> None:
    """Its cache forgets keys; the states are those of whole rows."""
    config = MistralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
    )
    recorder = StateRecorder(MistralForCausalLM(config).eval(), [1])
    recorder.share_opening([1, 2, 3])
    assert recorder.opening is None
    assert len(next(iter(recorder.record([[4, 5]])))[1]) == 2
