"""Every way in which a head's attention over packed documents can be computed, for tests that must hold under each."""

from collections.abc import Callable, Sequence

import pytest
from drafthead.pipeline.heads import recursive
from drafthead.pipeline.heads.unroll_attention import all_at_once, unroll_attention
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def all_at_once_forward(
    query: Tensor, base: Pair, own: Sequence[Pair], documents: Sequence[tuple[int, int]], row_T: Tensor
) -> Tensor:
    """FlexAttention takes no tensor with a gradient on a CPU."""
    (keys, values), *rest = [(one.detach(), other.detach()) for one, other in (base, *own)]
    return all_at_once(query.detach(), (keys, values), rest, documents, row_T)


WAYS: dict[str, Callable[..., Tensor]] = {
    "as the device asks": unroll_attention,
    "all at once": all_at_once_forward,
}


@pytest.fixture(params=WAYS)
def attention_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute the attention of all heads in this way."""
    monkeypatch.setattr(recursive, "unroll_attention", WAYS[request.param])
    return str(request.param)
