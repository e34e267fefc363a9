"""Medusa-2: the heads and the target trained together, the target through low-rank adapters (LoRA).

One module takes the place of the head in `pipeline/train.py`: it runs the adapted target over each pack, hands its
states to the head, and adds the target's own loss, which holds it to the target that wrote the answers (Cai et al.
2024, section 2.3: self-distillation from the target without its adapters, whose states are the stored ones):

    loss = target_weight * sum_i KL(p_stored || p_adapted)(x[i+1]) + heads_weight * the head's loss

Both sums run over as many slots: the head's first one predicts x[i+2] for just those tokens. What the heads are held
against is the adapted target, since that is the one they will draft for.

Shapes: T packed tokens, B documents run together, D hidden, R rows of supervised slots.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.eval.states import StateRecorder
from drafthead.kernels.linear_soft_ce.op import linear_soft_ce
from drafthead.kernels.linear_soft_ce.reference import TargetStates
from drafthead.pipeline.heads.base import FrozenTarget, Head, HeadBatch, HeadOutput, Objective
from drafthead.pipeline.heads.chains import padded_rows
from drafthead.pipeline.recipe import LoraConfig
from drafthead.pipeline.target import Target
from torch import Tensor, nn

LEAST_FILLED = 0.75
"""Documents run together while the shortest has this share of the longest one's tokens: padding costs as much."""


class JointModel(nn.Module):
    """A head and the target that it reads, called as the head alone is; its state holds no frozen tensor of the target.

    Attributes:
        target: The target in transformers, whose adapters alone train.
        adapted: Names of the target's tensors that the adapters change.
    """

    def __init__(self, head: Head, target: Target, settings: LoraConfig, seed: int):
        """Load the target in fp32 and give it adapters, which change nothing yet.

        Raises:
            InputError: A matrix that gets an adapter has another name on disk.
        """
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model

        super().__init__()
        self.head = head
        self.settings = settings
        torch.manual_seed(seed)
        config = PeftConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=list(settings.targets),
        )
        self.target: Any = get_peft_model(target.load(torch.float32, "cpu"), config)
        self.adapted = [f"{name}.weight" for name in self.target.base_model.targeted_module_names]
        if unknown := [name for name in self.adapted if name not in target.tensor_files]:
            raise InputError(f"head.lora: {target.path} holds no tensor {unknown[0]}, which an adapter would change")
        self.recorder = StateRecorder(self.target.get_base_model(), [], detach=False)
        trained = {name for name, one in self.named_parameters() if one.requires_grad}
        self.left_out = {name for name in self.state_dict() if name.startswith("target.") and name not in trained}
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_post_hook(_expect_left_out)

    def forward(self, batch: HeadBatch, frozen: FrozenTarget, objective: Objective) -> HeadOutput:
        """The head's output on the adapted target's states; while training, with the loss of both."""
        adapted = replace(batch, last_TD=self.last_states(batch))
        output: HeadOutput = self.head(adapted, frozen, objective)
        if not self.training:
            return output
        own = self.settings.target_weight * self.target_loss(batch.last_TD, adapted, frozen)
        return replace(output, loss=own + self.settings.heads_weight * output.loss)

    def last_states(self, batch: HeadBatch) -> Tensor:
        """The adapted target's states before its final norm, of documents that do not see each other: [T, D]."""
        found: dict[int, Tensor] = {}
        lengths = [length for _, length in batch.documents]
        for group in similar_lengths(lengths):
            tokens_BT = batch.tokens_T.new_zeros(len(group), lengths[group[0]])
            for row, number in enumerate(group):
                start, length = batch.documents[number]
                tokens_BT[row, :length] = batch.tokens_T[start : start + length]
            # padded on the right: no real token attends to what comes after it
            self.recorder.decoder(input_ids=tokens_BT, use_cache=False)
            last_BTD = self.recorder.last()
            found.update({number: last_BTD[row, : lengths[number]] for row, number in enumerate(group)})
        return torch.cat([found[number] for number in range(len(lengths))])

    def target_loss(self, stored_TD: Tensor, adapted: HeadBatch, frozen: FrozenTarget) -> Tensor:
        """Sum of KL(stored || adapted) over the supervised tokens and the full vocabulary."""
        slot_R, real_R = padded_rows(adapted.step_masks(1)[0].nonzero().squeeze(-1))
        row_R = slot_R + 1
        lm_head_VD = self.target.get_output_embeddings().weight
        dtype = product_dtype(lm_head_VD)
        wanted = TargetStates(state_RE=frozen.normed(stored_TD[row_R]).to(dtype), lm_head_UE=lm_head_VD.to(dtype))
        hidden_RD = frozen.normed(adapted.last_TD[row_R]).to(dtype)
        label_R = adapted.tokens_T[row_R + 1]
        return linear_soft_ce(hidden_RD, lm_head_VD, wanted, real_R.float(), label_R, "kl").total

    def adapters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.target.parameters() if parameter.requires_grad]

    def merged_tensors(self) -> dict[str, Tensor]:
        """The target's tensors that training has changed, fp32, by their names on disk; ends the adapters."""
        merged = self.target.merge_and_unload()
        return {name: merged.get_parameter(name).detach().cpu() for name in self.adapted}


def head_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the head in the state of a `JointModel`, by the head's own names."""
    return {name.removeprefix("head."): one for name, one in weights.items() if name.startswith("head.")}


def product_dtype(tensor: Tensor) -> torch.dtype:
    """In which type matrix products are computed where this is called."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def similar_lengths(lengths: list[int]) -> Iterator[list[int]]:
    """Numbers of documents to run as one padded batch, the longest first."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    group: list[int] = []
    for number in order:
        if group and lengths[number] < LEAST_FILLED * lengths[group[0]]:
            yield group
            group = []
        group.append(number)
    yield group


def check_adapters(settings: LoraConfig, target: Target) -> None:
    """Refuse, before any work, adapters of matrices that the target's layers lack.

    Raises:
        InputError: Naming what there is; or `peft` is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise InputError("head.lora: the package peft is not installed; run `make setup`")
    inside = [name.removesuffix(".weight") for name in target.tensor_files if "layers." in name]
    known = sorted({name.rsplit(".", 1)[-1] for name in inside if "norm" not in name})
    for name in settings.targets:
        if name not in known:
            raise InputError(f"head.lora.targets={name}: the layers of {target.path} have {', '.join(known)}")


def _leave_out(model: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Of `state_dict`: the target's frozen tensors are on disk already."""
    assert isinstance(model, JointModel)
    for name in model.left_out:
        state.pop(prefix + name, None)


def _expect_left_out(model: nn.Module, keys: Any) -> None:
    assert isinstance(model, JointModel)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in model.left_out]
