"""A real vLLM loads an exported head, and its counters are those of the walk.

The target is a Llama whose greedy text can be computed by hand: token v is followed by 1 + 5 v mod 509,
whatever came before; 511 is followed by 510 and that by the end of turn. The head reads the newest token
alone, through its attention, and drafts that rule; it misses exactly the tokens that its draft vocabulary
lacks. A wrong layout, map, norm or position breaks that pattern.
"""

from pathlib import Path

import pytest
import torch
from drafthead.data.files import read_json
from drafthead.eval.acceptance import walk
from drafthead.eval.engine import Engine, EngineConfig, Request, Result, is_available
from drafthead.pipeline.export import rope
from drafthead.pipeline.export.eagle3 import HeadOptions, export_head
from drafthead.pipeline.export.folder import initial_digests
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.target import Target
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [pytest.mark.serve, pytest.mark.skipif(not is_available(), reason="vllm is not installed")]

V, D, P, K = 512, 64, 32, 3
EOS = 0
ANSWER_LENGTHS = [1, 2, 5, 12, 13, 14, 15, 16, 40]


def follower(token: int) -> int:
    return {511: 510, 510: EOS}.get(token, 1 + 5 * token % 509)


def text_from(token: int, length: int) -> list[int]:
    text = [token]
    while len(text) < length:
        text.append(follower(text[-1]))
    return text


def rule_rows(embedding_VD: Tensor) -> Tensor:
    """An output matrix under which embedding v scores highest at v's follower."""
    rows = torch.zeros_like(embedding_VD)
    for token in range(V):
        rows[follower(token)] += embedding_VD[token]
    return rows


def write_target(folder: Path) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=P,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(rule_rows(model.model.embed_tokens.weight))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(V)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token="w0", eos_token="w0"
    )
    tokenizer.save_pretrained(folder)
    return Target(folder)


def rule_head(embedding_VD: Tensor, ids_U: Tensor) -> dict[str, Tensor]:
    """Attention looks at its own position alone and hands the token's embedding on; all else is faint.

    That goes for the state fed back too: normed before the residual, it is scaled by `hidden_norm`.
    """

    def faint(*shape: int) -> Tensor:
        return 1e-4 * torch.randn(*shape)

    token_part = torch.cat([torch.eye(D), torch.zeros(D, D)], dim=1)
    return {
        "fc.weight": faint(D, 3 * D),
        "midlayer.hidden_norm.weight": 1e-3 * torch.ones(D),
        "midlayer.input_layernorm.weight": torch.ones(D),
        "midlayer.self_attn.q_proj.weight": 4 * token_part,
        "midlayer.self_attn.k_proj.weight": 4 * token_part,
        "midlayer.self_attn.v_proj.weight": token_part,
        "midlayer.self_attn.o_proj.weight": torch.eye(D),
        "midlayer.post_attention_layernorm.weight": torch.ones(D),
        "midlayer.mlp.gate_proj.weight": faint(96, D),
        "midlayer.mlp.up_proj.weight": faint(96, D),
        "midlayer.mlp.down_proj.weight": faint(D, 96),
        "norm.weight": torch.ones(D),
        "lm_head.weight": rule_rows(embedding_VD)[ids_U],
    }


def write_export(folder: Path, target: Target, ids_U: Tensor) -> None:
    state = rule_head(target.embedding_VD, ids_U)
    export_head(
        folder,
        head_state=state,
        options=HeadOptions(aux_layer_ids=(1, 2, 4), norm_before_residual=True),
        target=target,
        d2t=ids_U - torch.arange(len(ids_U)),
        t2d=torch.zeros(V, dtype=torch.bool).index_fill(0, ids_U, True),
        k=K,
        dtype="float32",
        inv_freq=rope.inverse_frequencies(rope.rope_of(read_json(target.path / "config.json")), P),
        trained_length=512,
        initial_digests=initial_digests({name: tensor + 1 for name, tensor in state.items()}),
    )


def requests() -> list[Request]:
    cut = [
        Request(key=f"cut at {length}", prompt_ids=text_from(3 + length, 6), max_new_tokens=length)
        for length in ANSWER_LENGTHS
    ]
    return [*cut, Request(key="ended", prompt_ids=[5, 6, 7, 511], max_new_tokens=20)]


def plain_answer(request: Request) -> list[int]:
    answer = text_from(follower(request.prompt_ids[-1]), request.max_new_tokens)
    return answer[: answer.index(EOS) + 1] if EOS in answer else answer


def predicted_rounds(request: Request, drafted: set[int]) -> list[int]:
    context, answer = len(request.prompt_ids), plain_answer(request)
    text = [*request.prompt_ids, *answer, *text_from(answer[-1], K + 1)[1:]]
    rows = [[token in drafted for token in text[i + 2 : i + 2 + K]] for i in range(len(text) - 1 - K)]
    return walk(torch.tensor(rows), context - 1, context + len(answer) - 1, text_last=len(text) - 1)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Result], list[int], int, set[int]]:
    folder = tmp_path_factory.mktemp("serve")
    target = write_target(folder / "target")
    ids_U = torch.tensor([token for token in range(V) if token % 4 != 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHEAD_CACHE", str(folder / "cache"))
        write_export(folder / "export", target, ids_U)
        assert preflight(folder / "export", target.path).failures == []
    config = EngineConfig(
        model=str(target.path),
        max_model_len=128,
        kv_cache_gib=1,
        speculative_config=read_json(folder / "export" / "speculative_config.json"),
    )
    with Engine(config, folder / "vllm.log") as engine:
        results = {result.key: result for result in engine.generate(requests())}
        counters = engine.counters()
    return results, counters.num_accepted_tokens_per_pos, counters.num_drafts, set(ids_U.tolist())


def test_text_equals_plain_greedy_text(served: tuple[dict[str, Result], list[int], int, set[int]]) -> None:
    for request in requests():
        assert served[0][request.key].token_ids == plain_answer(request)
    assert served[0]["ended"].finish_reason == "stop"


def test_counters_equal_the_walk_last_rounds_included(
    served: tuple[dict[str, Result], list[int], int, set[int]],
) -> None:
    _, per_position, num_drafts, drafted = served
    rounds = [count for request in requests() for count in predicted_rounds(request, drafted)]
    assert num_drafts == len(rounds)
    assert per_position == [sum(count > position for count in rounds) for position in range(K)]
    # one round gave the end of turn and two more tokens that nobody received
    assert predicted_rounds(requests()[-1], drafted) == [3]
    assert 0 < per_position[-1] < num_drafts
