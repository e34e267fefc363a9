"""A head begun as a published one has its tensors and its map, whatever the spelling; each difference has a name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import InputError
from drafthead.pipeline.export.eagle3 import HeadOptions, export_head
from drafthead.pipeline.export.folder import TrainedHead, initial_digests
from drafthead.pipeline.export.mtp import write_mtp
from drafthead.pipeline.heads.base import FrozenTarget, Head
from drafthead.pipeline.heads.build import build_frozen_target, build_head
from drafthead.pipeline.heads.mtp import MTP, MTPOptions
from drafthead.pipeline.heads.warm_start import (
    check_warm_start,
    draft_vocab_size,
    kept_vocab,
    load_warm_start,
    warm_start_hash,
)
from drafthead.pipeline.recipe import Recipe, load_recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.target import Target
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5TextConfig

U, AUX = 64, [1, 4, 6]
RECIPE = ("capture.aux_layers=[1,4,6]", "draft_vocab.size=null")
Folder = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture
def target(tiny_target: Path) -> Target:
    return Target(tiny_target)


def every_seventh(target: Target) -> DraftVocab:
    ids = torch.arange(U) * 7 + 3
    t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocab(ids - torch.arange(U), t2d)


def new_head(recipe: Recipe, target: Target, vocab: DraftVocab) -> Head:
    frozen = build_frozen_target(target, vocab)
    return build_head(recipe.head, target, frozen, len(recipe.capture.aux_layers or []), seed=0)


def random_state(recipe: Recipe, target: Target, vocab: DraftVocab) -> Tensors:
    """Tensors that no initialisation gives."""
    generator = torch.Generator().manual_seed(5)
    state = new_head(recipe, target, vocab).state_dict()
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def published(folder: Path, target: Target, *overrides: str) -> tuple[Path, Tensors]:
    """An export of ours, and the tensors of its head."""
    recipe, vocab = load_recipe("smoke/eagle3", [*RECIPE, *overrides]), every_seventh(target)
    state = random_state(recipe, target, vocab)
    norms = {name: getattr(recipe.head, name) for name in HeadOptions(aux_layer_ids=()).norms()}
    export_head(
        folder,
        head_state=state,
        options=HeadOptions(aux_layer_ids=tuple(AUX), **norms),
        target=target,
        d2t=vocab.d2t,
        t2d=vocab.t2d,
        k=3,
        dtype="float32",
        inv_freq=[],
        trained_length=8,
        initial_digests=initial_digests(state),
    )
    return folder, state


def rewrite(
    folder: Path,
    config: Callable[[Folder], Folder | None] = lambda config: None,
    tensors: Callable[[Tensors], Tensors | None] = lambda tensors: None,
) -> Path:
    """Change a folder's config and tensors, in place or by what the functions return."""
    path = folder / "config.json"
    values, held = json.loads(path.read_text()), load_file(folder / "model.safetensors")
    values, held = config(values) or values, tensors(held) or held
    path.write_text(json.dumps(values))
    (folder / "model.safetensors").unlink()
    save_file(held, folder / "model.safetensors")
    return folder


def as_speculators(config: Folder) -> Folder:
    """As speculators 0.5 writes it; `norm_before_residual` is left out, which means true there."""
    layer = {name: value for name, value in config.items() if not name.startswith(("eagle", "norm_", "draft", "fc_"))}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/model"},
        },
        "transformer_layer_config": {**layer, "architectures": None},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
    }


def speculators_names(tensors: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def started(folder: Path, target: Target, *overrides: str) -> tuple[Head, DraftVocab]:
    """What `drafthead train` starts from."""
    recipe = load_recipe("smoke/eagle3", [*RECIPE, f"train.init_from={folder}", *overrides])
    check_warm_start(recipe, target)
    vocab = kept_vocab(recipe, target)
    assert vocab is not None
    head = new_head(recipe, target, vocab)
    load_warm_start(head, recipe, target, build_frozen_target(target, vocab))
    return head, vocab


def assert_is(head: Head, vocab: DraftVocab, state: Tensors, expected: DraftVocab) -> None:
    found = head.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(vocab.d2t, expected.d2t)
    assert torch.equal(vocab.t2d, expected.t2d)


# ---- spellings


@pytest.mark.parametrize("norms", [(), ("head.norm_before_fc=true", "head.fc_norm=true", "head.norm_output=true")])
def test_our_export_gives_its_tensors_and_its_map(norms: tuple[str, ...], target: Target, tmp_path: Path) -> None:
    folder, state = published(tmp_path / "head", target, *norms)
    assert_is(*started(folder, target, *norms), state, every_seventh(target))


def test_names_with_prefixes(target: Target, tmp_path: Path) -> None:
    folder, state = published(tmp_path / "head", target)
    rewrite(folder, tensors=lambda held: {f"model.{name}": one for name, one in speculators_names(held).items()})
    assert_is(*started(folder, target), state, every_seventh(target))


def test_a_pickled_checkpoint(target: Target, tmp_path: Path) -> None:
    folder, state = published(tmp_path / "head", target)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_is(*started(folder, target), state, every_seventh(target))


def test_speculators_layout_and_its_other_default(target: Target, tmp_path: Path) -> None:
    norm = "head.norm_before_residual=true"
    folder, state = published(tmp_path / "head", target, norm)
    rewrite(folder, as_speculators, speculators_names)
    assert_is(*started(folder, target, norm), state, every_seventh(target))
    with pytest.raises(InputError, match=r"head\.norm_before_residual is true there and false in the recipe"):
        started(folder, target)


def test_an_untrained_lm_head_keeps_the_published_rows(target: Target, tmp_path: Path) -> None:
    folder, state = published(tmp_path / "head", target)
    head, _ = started(folder, target, "head.train_lm_head=false")
    assert torch.equal(head.lm_head.weight, state["lm_head.weight"])
    assert not head.lm_head.weight.requires_grad


# ---- differences


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name: tensor for name, tensor in held.items() if name not in names}


def setting(**values: Any) -> Callable[[Folder], Folder]:
    return lambda config: {**config, **values}


def other_theta(config: Folder) -> Folder:
    return {**config, "rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


DIFFERENCES: dict[str, tuple[Any, Any, tuple[str, ...], str]] = {
    "norm": (None, None, ("head.fc_norm=true",), r"head\.fc_norm is false there and true .* set head\.fc_norm=false"),
    "norm that vLLM takes from eagle_config": (
        setting(eagle_config={"norm_before_fc": True}),
        None,
        (),
        r"head\.norm_before_fc is true there and false",
    ),
    "layers": (
        setting(eagle_aux_hidden_state_layer_ids=[0, 4, 6]),
        None,
        (),
        r"capture\.aux_layers is \[0, 4, 6\] there and \[1, 4, 6\] in the recipe",
    ),
    "layers that a server would guess": (
        setting(eagle_aux_hidden_state_layer_ids=None, eagle_config=None),
        None,
        (),
        r"capture\.aux_layers is \[2, 4, 5\] there and \[1, 4, 6\] in the recipe",
    ),
    "rope": (other_theta, None, (), r"rope_theta 500000\.0 there and .*rope_theta 10000\.0 in the target"),
    "unknown rope": (setting(rope_parameters={"rope_type": "dynamic"}), None, (), r"rope_type: dynamic is not"),
    "size": (setting(num_attention_heads=4), None, (), r"num_attention_heads is 4 there and 2 in the target"),
    "draft vocabulary": (None, None, ("draft_vocab.size=256",), r"draft_vocab\.size=256: the head has 64 draft tokens"),
    "no map": (None, without("d2t"), (), r"no vocabulary map in it, though lm_head has 64 rows and the target 512"),
    "map beyond the target": (
        None,
        lambda held: {**held, "d2t": held["d2t"] + 100},
        (),
        r"its vocabulary map runs from 103 to 544, the target has 512 tokens",
    ),
    "map without lm_head": (None, without("lm_head.weight"), (), r"no lm_head\.weight in it"),
    "other kind": (setting(speculators_model_type="peagle", transformer_layer_config={}), None, (), "'peagle' there"),
    "missing tensor": (None, without("midlayer.mlp.up_proj.weight"), (), r"midlayer\.mlp\.up_proj\.weight: no such"),
    "unknown tensor": (
        None,
        lambda held: {**held, "midlayer.self_attn.q_norm.weight": torch.ones(32)},
        (),
        r"midlayer\.self_attn\.q_norm\.weight: the recipe's eagle3 head has no such tensor",
    ),
    "shape": (
        None,
        lambda held: {**held, "fc.weight": torch.ones(64, 128)},
        (),
        r"fc\.weight: shape \[64, 128\] there and \[64, 192\] in the recipe's head",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_difference_is_named(difference: str, target: Target, tmp_path: Path) -> None:
    config, tensors, overrides, said = DIFFERENCES[difference]
    folder, _ = published(tmp_path / "head", target)
    rewrite(folder, config or (lambda values: None), tensors or (lambda held: None))
    with pytest.raises(InputError, match=said) as caught:
        started(folder, target, *overrides)
    assert str(caught.value).startswith(f"train.init_from={folder}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [("gone", "no such folder"), ("no config", "config.json: no such file"), ("no tensors", "no \\*.safetensors")],
)
def test_a_folder_that_is_no_head(damage: str, said: str, target: Target, tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "head", target)
    if damage != "gone":
        (folder / ("config.json" if damage == "no config" else "model.safetensors")).unlink()
    with pytest.raises(InputError, match=said):
        started(folder if damage != "gone" else tmp_path / "nowhere", target)


# ---- Medusa


def medusa_folder(folder: Path, target: Target, names: Callable[[str], str], *overrides: str) -> tuple[Path, Tensors]:
    recipe = load_recipe("smoke/eagle3", [f"head={{type: medusa, {', '.join(overrides)}}}", "capture.aux_layers=[]"])
    vocab = every_seventh(target) if recipe.head.type == "medusa" and recipe.head.shared_lm_head else whole(target)
    state = random_state(recipe, target, vocab)
    folder.mkdir()
    tensors = {names(name): tensor for name, tensor in state.items()}
    if vocab.size < target.vocab_size:
        tensors["token_map"] = vocab.target_ids()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "hidden_size": 64}))
    return folder, state


def whole(target: Target) -> DraftVocab:
    size = target.vocab_size
    return DraftVocab(torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool))


def first_names(name: str) -> str:
    """As FasterDecoding's `medusa_lm_head` spells them: a head is a sequence of blocks and a projection."""
    parts = name.split(".")
    return f"{parts[1]}.{parts[3]}.linear.{parts[4]}" if parts[0] == "blocks" else f"{parts[1]}.2.weight"


def test_medusa_with_a_shared_lm_head_and_a_token_map(target: Target, tmp_path: Path) -> None:
    said = ("num_heads: 3", "num_layers: 2")
    folder, state = medusa_folder(tmp_path / "m", target, lambda name: name, *said)
    overrides = (f"head={{type: medusa, {', '.join(said)}}}", "capture.aux_layers=[]")
    head, vocab = started(folder, target, *overrides)
    assert_is(head, vocab, state, every_seventh(target))
    with pytest.raises(InputError, match=r"head\.num_layers is 2 there and 1 in the recipe"):
        started(folder, target, "head={type: medusa}", "capture.aux_layers=[]")


def test_medusa_under_its_first_names(target: Target, tmp_path: Path) -> None:
    said = ("num_heads: 3", "num_layers: 2", "bias: true", "shared_lm_head: false", "train_lm_head: true")
    folder, state = medusa_folder(tmp_path / "m", target, first_names, *said)
    overrides = (f"head={{type: medusa, {', '.join(said)}}}", "capture.aux_layers=[]")
    assert_is(*started(folder, target, *overrides), state, whole(target))


# ---- MTP

WHOLE = ("capture.aux_layers=[]", "draft_vocab.size=512")


def test_mtp_out_of_a_stitched_checkpoint(target: Target, tmp_path: Path) -> None:
    """The zero biases that a Llama target's layer is written with are no part of the head."""
    recipe = load_recipe("smoke/mtp", WHOLE)
    state = random_state(recipe, target, whole(target)) | {"lm_head.weight": target.lm_head_VD}
    description = {
        "options": {"layout": "mimo", "draft_vocab_size": 512, "qkv_bias": False},
        "initial_digests": initial_digests(state),
        "trained_length": 8,
        "inv_freq": [],
    }
    head = TrainedHead(state=state, description=description, target=target, vocab=whole(target), k=3, dtype="float32")
    write_mtp(tmp_path / "stitched", head)
    recipe = load_recipe("smoke/mtp", [*WHOLE, f"train.init_from={tmp_path / 'stitched'}"])
    check_warm_start(recipe, target)
    again = new_head(recipe, target, whole(target))
    load_warm_start(again, recipe, target, build_frozen_target(target, whole(target)))
    assert_is(again, whole(target), state, whole(target))
    both = load_recipe("smoke/mtp", [*WHOLE, f"train.init_from={tmp_path / 'stitched'}", "head.start=native"])
    with pytest.raises(InputError, match=r"head\.start=native and train\.init_from=.*set head\.start=fresh"):
        check_warm_start(both, target)


def test_mtp_as_speculators_spells_it(tmp_path: Path) -> None:
    layer = Qwen3_5TextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["full_attention"] * 4,
    )
    layer.save_pretrained(tmp_path / "target")
    options = MTPOptions(layout="qwen3_5", draft_vocab_size=32)
    saved, head = MTP(layer, options), MTP(layer, options)
    names = {"token_norm.": "token_layernorm.", "hidden_norm.": "hidden_layernorm.", "fc.": "input_proj."}
    names |= {"final_norm.": "final_layernorm.", "layer.": ""}
    held = {}
    for name, tensor in saved.state_dict().items():
        for ours, theirs in names.items():
            if name.startswith(ours):
                held[f"mtp_layers.0.{theirs}{name.removeprefix(ours)}"] = torch.randn_like(tensor)
    (tmp_path / "head").mkdir()
    save_file(held, tmp_path / "head" / "model.safetensors")
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer.to_dict()}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    recipe = load_recipe("smoke/mtp", [f"train.init_from={tmp_path / 'head'}"])
    rows = torch.randn(32, 16)
    frozen = FrozenTarget(rows, torch.ones(16), rows, torch.arange(32), 1e-6)
    load_warm_start(head, recipe, Target(tmp_path / "target"), frozen)
    assert torch.equal(head.fc.weight, held["mtp_layers.0.input_proj.weight"])
    assert torch.equal(head.layer.mlp.up_proj.weight, held["mtp_layers.0.mlp.up_proj.weight"])
    assert torch.equal(head.final_norm.weight, held["mtp_layers.0.final_layernorm.weight"])
    assert torch.equal(head.lm_head.weight, rows)


def test_mtp_of_another_family(target: Target, tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "head", target)
    rewrite(folder, setting(model_type="deepseek_v3"))
    recipe = load_recipe("smoke/mtp", [*WHOLE, f"train.init_from={folder}"])
    head = new_head(load_recipe("smoke/mtp", WHOLE), target, whole(target))
    with pytest.raises(InputError, match=r"model_type 'deepseek_v3' there, whose MTP layer is not mimo's"):
        load_warm_start(head, recipe, target, build_frozen_target(target, whole(target)))


# ---- in a run


def test_the_stage_keeps_the_map_and_its_key_holds_the_folder(tiny_run: Run, make_run: Any, tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "head", tiny_run.target)
    run = make_run("warm", *RECIPE, f"train.init_from={folder}")
    for name in ("prompts", "respond", "encode"):
        assert not run.run_stage(name), f"{name} comes from the cache"
    assert run.run_stage("draft-vocab")
    assert run.report("draft-vocab")["size"] == U
    kept = DraftVocab.load(run.input("draft-vocab") / "draft_vocab.safetensors")
    assert torch.equal(kept.d2t, every_seventh(tiny_run.target).d2t)
    before = warm_start_hash(run.recipe)
    rewrite(folder, tensors=lambda held: {**held, "d2t": held["d2t"] + 1})
    assert warm_start_hash(run.recipe) != before
    assert replace(run).key("draft-vocab") != run.key("draft-vocab")
    assert tiny_run.ingredients("draft-vocab")["extra"] is None


@pytest.mark.slow
def test_training_goes_on_from_the_export(tiny_run: Run, make_run: Any) -> None:
    """The digests that `preflight` knows an untrained head by are those of the head that training began with."""
    run = make_run("warm", f"train.init_from={tiny_run.path / 'export'}", "train.tokens=2k", "train.learning_rate=1e-5")
    for name in ("prompts", "respond", "encode", "draft-vocab", "capture", "train"):
        run.run_stage(name)
    trained = load_file(tiny_run.path / "train" / "head.safetensors")
    description = json.loads((run.path / "train" / "head.json").read_text())
    assert description["initial_digests"] == initial_digests(trained)
    ours = load_file(run.path / "train" / "head.safetensors")
    assert all((ours[name] - tensor).abs().max() < 1e-2 for name, tensor in trained.items())
    first = run.report("train")["walk"]["mean_acceptance_length"]
    assert first == pytest.approx(tiny_run.report("train")["walk"]["mean_acceptance_length"], abs=0.1)


@pytest.mark.parametrize("size", [513, 600])
def test_a_draft_vocabulary_above_the_targets_is_refused_before_any_work(size: int, target: Target) -> None:
    recipe = load_recipe("smoke/eagle3", [f"draft_vocab.size={size}"])
    with pytest.raises(InputError, match=rf"draft_vocab\.size={size}: give 1 to .* or 512 \(all"):
        draft_vocab_size(recipe, target)


def test_without_a_size_a_small_target_is_drafted_whole(target: Target) -> None:
    assert draft_vocab_size(load_recipe("smoke/eagle3", ["draft_vocab.size=null"]), target) == 512
