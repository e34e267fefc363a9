"""Medusa-2: the target trained with the heads, written as a folder of its own, and served in the place of the first."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.batches import load_pack, supervised_slots
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, read_jsonl
from drafthead.pipeline import train as training
from drafthead.pipeline import train_loop
from drafthead.pipeline.export.folder import serve_command
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.base import HeadBatch, Objective
from drafthead.pipeline.heads.build import build_head
from drafthead.pipeline.joint import JointModel, similar_lengths
from drafthead.pipeline.merged_target import compare_quality, write_merged
from drafthead.pipeline.recipe import LoraConfig, load_recipe
from drafthead.pipeline.run_dir import Run, create_run
from drafthead.pipeline.stages import STAGES, _train_settings
from drafthead.pipeline.target import Target
from drafthead.pipeline.train_inputs import Inputs
from safetensors.torch import load_file

from tests.conftest import reset_accelerator

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

SMOKE = "smoke/medusa"
BEFORE_TRAINING = ("prompts", "respond", "encode", "draft-vocab", "capture")
LORA = "head.lora={rank: 4, alpha: 8, learning_rate: 0.002}"
SETTINGS = LoraConfig(rank=4, alpha=8)


@pytest.fixture
def make(cache: Path, tmp_path: Path) -> Any:
    """Make a run of the smoke recipe, ready to train."""

    def made(name: str, *overrides: str) -> Run:
        run = create_run(load_recipe(SMOKE, [f"run.dir={tmp_path}", f"run.name={name}", LORA, *overrides]), STAGES)
        for stage in BEFORE_TRAINING:
            run.run_stage(stage)
        return run

    return made


@pytest.fixture
def joint(make: Any) -> tuple[JointModel, HeadBatch, Inputs, Run]:
    """An untrained joint model and a batch of five documents of several lengths."""
    run = make("joint")
    inputs = Inputs.open(run)
    head = build_head(run.recipe.head, run.target, inputs.frozen, 3, seed=0)
    pack = load_pack(inputs.rows[:5], inputs.store)
    return JointModel(head, run.target, SETTINGS, seed=0), HeadBatch(**vars(pack)), inputs, run


OBJECTIVE = Objective(depth=3, step_weight=0.8)


def disturb(model: JointModel) -> None:
    """Adapters begin as zero; give them something to do."""
    with torch.no_grad():
        for name, parameter in model.target.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)


# ---- through the pipeline


@pytest.mark.slow
def test_the_smoke_recipe_exports_heads_for_the_changed_target(make: Any) -> None:
    run = make("whole", "train.tokens=6k")
    for stage in ("train", "eval", "export"):
        run.run_stage(stage)
    changed, export = run.served_target, run.folder("export")
    assert changed.path == (run.path / "train" / "target").resolve()
    assert changed.fingerprint != run.target.fingerprint
    assert preflight(export, changed.path).failures == []
    of_first = preflight(export, run.target.path)
    assert [one["field"] for one in of_first.failures] == ["drafthead.target_fingerprint"]
    assert read_json(export / "config.json")["drafthead"]["target_fingerprint"] == changed.fingerprint
    assert read_json(run.path / "run.json")["target_path"] == str(changed.path)
    assert run.report("eval")["identical_to_plain"] == "4/4"

    quality = run.report("train")["target_quality"]
    assert quality["tokens"] > 50
    assert quality["before"]["top1_agreement"] > 0.95, "it wrote these answers, greedily"
    assert quality["drop"]["mean_logprob"] == quality["before"]["mean_logprob"] - quality["after"]["mean_logprob"] != 0
    card = (export / "README.md").read_text()
    assert f"for a changed form of `builtin:tiny-random` (fingerprint `{changed.fingerprint}`)" in card
    assert "not to `builtin:tiny-random` itself" in card
    assert f"on {quality['tokens']:,} held-out answer tokens" in card
    assert serve_command(changed.path, export) in card

    old, new = (load_file(one.path / "model.safetensors") for one in (run.target, changed))
    assert old.keys() == new.keys()
    differing = {name for name in old if not torch.equal(old[name], new[name])}
    assert differing == {f"model.layers.{i}.self_attn.{m}_proj.weight" for i in range(8) for m in "qkvo"}
    for path in run.target.path.iterdir():
        if path.suffix != ".safetensors":
            assert (changed.path / path.name).read_bytes() == path.read_bytes()
    assert all("lora" not in name for name in load_file(run.path / "train" / "head.safetensors"))


class Killed(BaseException):
    """Stands for a kill at a place that a test chooses."""


@pytest.mark.slow
def test_resumed_equals_uninterrupted(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("train.tokens=2k", "train.batch_tokens=256", "train.accumulation=2", "train.checkpoint_every=2")
    straight, killed = (make(name, *settings, "train.log_every=1") for name in ("straight", "killed"))
    training.work(straight)
    save = train_loop.save_checkpoint

    def save_and_die(*arguments: Any) -> None:
        save(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(train_loop, "save_checkpoint", save_and_die)
        reset_accelerator()
        with pytest.raises(Killed):
            training.work(killed)
    held = load_file(killed.path / "train" / "checkpoints" / "step-00000002" / "model.safetensors")
    assert any("lora_B" in name for name in held)
    assert not any("embed_tokens" in name or "base_layer" in name for name in held), "the target is on disk already"
    reset_accelerator()
    training.work(killed)
    logs = [
        [(row["step"], row["loss"]) for row in read_jsonl(run.path / "train" / "log.jsonl") if "loss" in row]
        for run in (straight, killed)
    ]
    assert logs[0] == logs[1]
    assert len(logs[0]) > 2
    for name in ("head.safetensors", "target/model.safetensors"):
        expected = load_file(straight.path / "train" / name)
        assert all(torch.equal(one, expected[key]) for key, one in load_file(killed.path / "train" / name).items())
    assert read_json(killed.path / "train" / "report.json") == read_json(straight.path / "train" / "report.json")


# ---- one step


def test_untrained_adapters_give_the_stored_states_and_no_loss_of_the_target(joint: Any) -> None:
    """So no document sees another, and the state is the one before the final norm."""
    model, batch, inputs, _ = joint
    stored_T = batch.last_TD.any(-1)  # the rest is not kept
    assert torch.equal(stored_T, stored_T | batch.step_masks(1)[0].roll(1))
    torch.testing.assert_close(model.last_states(batch)[stored_T], batch.last_TD[stored_T], rtol=1e-4, atol=1e-4)
    loss = model.target_loss(batch.last_TD, batch, inputs.frozen)
    assert abs(loss.item()) < 1e-3
    alone = model.head(batch, inputs.frozen, OBJECTIVE)
    output = model(batch, inputs.frozen, OBJECTIVE)
    assert output.loss.item() == pytest.approx(0.2 * alone.loss.item(), rel=1e-4)
    walked = model.eval()(batch, inputs.frozen, OBJECTIVE)
    assert torch.equal(walked.survived_TK, alone.survived_TK)
    assert walked.loss.item() == pytest.approx(alone.loss.item(), rel=1e-4)


def test_the_loss_of_the_target_is_the_divergence_from_the_one_that_wrote_the_answers(joint: Any) -> None:
    model, batch, inputs, run = joint
    disturb(model)
    states_TD = model.last_states(batch)
    found = model.target_loss(batch.last_TD, replace(batch, last_TD=states_TD), inputs.frozen)
    first = run.target.load(torch.float32, "cpu")
    expected, slots = 0.0, 0
    for row in inputs.rows[:5]:
        ids = torch.tensor([row.input_ids])
        with torch.no_grad():
            p, q = (one(input_ids=ids).logits[0, row.context_length - 1 : -1] for one in (first, model.target))
        expected += float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum())
        slots += len(p)
    assert slots == sum(supervised_slots(row) for row in inputs.rows[:5])
    assert expected > 0.1
    assert found.item() == pytest.approx(expected, rel=1e-3)


def test_gradients_reach_adapters_and_heads_and_nothing_else(joint: Any) -> None:
    model, batch, inputs, _ = joint
    disturb(model)
    before = {name: one.clone() for name, one in model.target.named_parameters()}
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model(batch, inputs.frozen, OBJECTIVE).loss.backward()
    optimizer.step()
    for name, parameter in model.target.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    moved = [name for name, one in model.head.named_parameters() if one.grad is not None and bool(one.grad.any())]
    assert len(moved) == model.head.options.num_heads * model.head.options.num_layers
    adapted = replace(batch, last_TD=model.last_states(batch))
    of_heads = model.head(adapted, inputs.frozen, OBJECTIVE).loss
    of_target = model.target_loss(batch.last_TD, adapted, inputs.frozen)
    assert of_heads.item() != pytest.approx(model.head(batch, inputs.frozen, OBJECTIVE).loss.item(), rel=1e-3)
    both = model(batch, inputs.frozen, OBJECTIVE).loss.item()
    assert both == pytest.approx(of_target.item() + 0.2 * of_heads.item(), rel=1e-5)
    by_heads = torch.autograd.grad(of_heads, model.adapters())
    assert all(bool(one.any()) for one in by_heads), "the heads' loss moves the target"


def test_the_merged_folder_computes_what_the_adapters_did(joint: Any, tmp_path: Path) -> None:
    model, batch, inputs, run = joint
    disturb(model)
    ids = batch.tokens_T[None, :40]
    with torch.no_grad():
        expected = model.eval().target(input_ids=ids).logits
    write_merged(tmp_path / "merged", run.target, model.merged_tensors())
    merged = Target(tmp_path / "merged")
    with torch.no_grad():
        found, first = (one.load(torch.float32, "cpu")(input_ids=ids).logits for one in (merged, run.target))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, first, atol=1e-2)
    worse = compare_quality(run.target, merged, inputs.heldout_rows)
    assert worse["drop"]["top1_agreement"] > 0.02
    assert [one.split()[0] for one in worse["warnings"]] == ["mean_logprob", "top1_agreement"]


def test_documents_of_similar_length_run_together() -> None:
    lengths = [40, 8, 100, 76, 41, 75, 74]
    groups = list(similar_lengths(lengths))
    assert [[lengths[number] for number in group] for group in groups] == [[100, 76, 75], [74], [41, 40], [8]]


# ---- refusals


def test_more_than_one_process_is_refused() -> None:
    with pytest.raises(InputError, match=r"run\.launch=ddp: head\.lora"):
        load_recipe(SMOKE, [LORA, "run.launch=ddp"])


def test_an_unknown_key_of_the_adapters_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown key head.lora.rnk; did you mean head.lora.rank\?"):
        load_recipe(SMOKE, ["head.lora={rnk: 2}"])


def test_matrices_that_the_target_lacks_are_refused_before_any_work(drafthead: Any, tmp_path: Path) -> None:
    done = drafthead("run", SMOKE, f"run.dir={tmp_path}/runs", "head.lora={targets: [q_proj, qkv_proj]}")
    assert (done.code, len(done.complaints)) == (2, 1)
    assert "head.lora.targets=qkv_proj: the layers of" in done.complaints[0]
    assert "have down_proj, gate_proj, k_proj" in done.complaints[0]
    assert not (tmp_path / "runs").exists()


def test_runs_without_adapters_keep_their_keys() -> None:
    assert "lora" not in _train_settings(load_recipe(SMOKE))["head"]
    assert _train_settings(load_recipe(SMOKE, [LORA]))["head"]["lora"]["rank"] == 4
