"""Which targets the installed vLLM gives EAGLE-3 heads to, read from its source without importing it."""

import json
import shutil
from pathlib import Path

import pytest
from drafthead.data.errors import InputError
from drafthead.pipeline.plan import check_head
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.servable import check_served
from drafthead.pipeline.target import Target, open_target

from tests.eval.vllm_source import vllm_folder

pytestmark = pytest.mark.usefixtures("cache")


def with_architecture(folder: Path, name: str) -> Target:
    vllm_folder()  # or skip
    shutil.copytree(open_target("builtin:tiny-random").path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    return Target(folder)


SERVED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM")
FURTHER = ("Qwen3_5ForConditionalGeneration", "SmolLM3ForCausalLM", "NoSuchForCausalLM")


@pytest.mark.parametrize("name", [*SERVED, *FURTHER])
def test_served_architectures_pass(tmp_path: Path, name: str) -> None:
    """By its own class, by one that it derives from (Mistral), or through transformers (unknown ones)."""
    check_served("eagle3", with_architecture(tmp_path / "target", name))


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma2ForCausalLM"])
def test_others_are_refused_before_any_stage(tmp_path: Path, name: str) -> None:
    """A113: vLLM says so only when it starts with the trained head."""
    target = with_architecture(tmp_path / "target", name)
    with pytest.raises(InputError, match=rf"{name}.*vLLM [\d.]+\S* serves no EAGLE-3 head.*head\.type=medusa"):
        check_head(load_recipe("smoke/eagle3"), target)
    check_served("medusa", target)
    check_served("mtp", target)
