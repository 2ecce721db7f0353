"""A product gives what `F.linear` gives, however its weight is stored."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.linear import Linear
from engine.loaders import load_model
from tests.tiny_models import save_tiny

# (outputs, inputs): SmolLM2's products, and widths that fill no block of a kernel.
SHAPES = ((960, 576), (576, 1536), (96, 64), (47, 31), (1, 1))
ROWS = (0, 1, 2, 7, 16, 48, 130)


def tensors(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    weight_OI = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    return weight_OI.to(dtype), torch.randn(shape[0], generator=generator).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_bfloat16_are_those_of_plain_weights_bit_for_bit(
    shape: tuple[int, int], has_bias: bool
) -> None:
    weight_OI, bias_O = tensors(shape, torch.bfloat16)
    bias = bias_O if has_bias else None
    product = Linear(weight_OI, bias)
    for num_rows in ROWS:
        x_TI = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(num_rows))
        assert torch.equal(product(x_TI.bfloat16()), F.linear(x_TI.bfloat16(), weight_OI, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_other_types_are_those_of_plain_weights(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight_OI, bias_O = tensors(shape, dtype)
    product = Linear(weight_OI, bias_O)
    for num_rows in ROWS:
        x_TI = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        expected_TO = F.linear(x_TI.double(), weight_OI.double(), bias_O.double())
        actual_TO = product(x_TI)
        assert actual_TO.dtype == dtype
        torch.testing.assert_close(
            actual_TO.double(), expected_TO, rtol=0, atol=100 * torch.finfo(dtype).eps, check_dtype=False
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_weight_comes_back_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_OI, _ = tensors(shape, dtype)
    assert torch.equal(Linear(weight_OI).weight_OI(), weight_OI)


@pytest.mark.parametrize("wanted", [slice(900, None), torch.tensor([7, 3, 959, 3])])
def test_some_rows_of_a_product_are_those_of_the_whole(wanted: slice | torch.Tensor) -> None:
    weight_OI, bias_O = tensors(SHAPES[0], torch.bfloat16)
    product = Linear(weight_OI, bias_O)
    x_TI = torch.randn(3, SHAPES[0][1], generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(product.rows(wanted)(x_TI), product(x_TI)[:, wanted])
    assert product.rows(wanted).num_outputs == len(bias_O[wanted])


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "llama_attention_bias", "qwen3_tied"])
def test_a_loaded_model_keeps_no_file_in_memory(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    model = load_model(folder, dtype="float32", device="cpu").model
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert torch.equal(model.embedding_VE, model.head.weight_OI()) == family.endswith("tied")
