"""How a CPU is used: which products are faster, and threads side by side."""

import pytest
import torch
from drafthead.pipeline import cores


@pytest.mark.parametrize(("slow", "expected"), [(torch.bfloat16, "float32"), (torch.float32, "bfloat16")])
def test_the_faster_product_decides(slow: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cores, "_seconds_of_product", lambda a, b: 2.0 if a.dtype == slow else 1.0)
    assert cores.fastest_dtype.__wrapped__() == expected


def test_bf16_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cores, "_seconds_of_product", lambda a, b: 1.0)
    assert cores.fastest_dtype.__wrapped__() == "bfloat16"


def test_products_are_really_timed() -> None:
    small, large = torch.randn(32, 32), torch.randn(1024, 1024)
    assert 0 < min(cores._seconds_of_product(small, small) for _ in range(5)) < cores._seconds_of_product(large, large)
