"""Checkpoints on disk: both formats, shards, refusals, and the conversion of GGUF to a folder."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.batch import ForwardBatch, Span
from engine.loaders import LoadedModel, load_model
from engine.loaders.convert import convert_gguf
from engine.models.config import RopeConfig, UnsupportedModel, model_config
from tests.tiny_models import build_tiny, pool_for, save_tiny, smollm2_gguf, write_tiny_gguf

TEXTS = (
    "Hello, world! It's 2026; don't panic.",
    "def f(x):\n    return {'a': x[0] ** 2}  # 12345\n\n\n",
    "日本語 🙂👍🏽 naïve café\t\t\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "   leading and trailing   ",
    "",
)
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]


def logits_of(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    span = Span(
        token_ids=ids,
        num_committed=0,
        pages=range(64),
        positions=range(len(ids)),
        logit_rows=range(len(ids)),
    )
    return loaded.model.forward(ForwardBatch(spans=[span]), pool_for(loaded)).logits_RV


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(smollm2_gguf(), tmp_path_factory.mktemp("converted") / "smollm2")


def test_smollm2_from_gguf_equals_transformers_on_the_converted_folder(converted: Path) -> None:
    """The folder holds values rounded to bfloat16, so the GGUF is loaded at that precision too."""
    folder = load_model(converted, dtype="float32", device="cpu")
    oracle = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    assert float((logits_of(folder, PROMPT) - expected).abs().max()) <= 2e-4
    rounded = load_model(smollm2_gguf(), dtype="bfloat16", device="cpu")
    folder_bf16 = load_model(converted, dtype="bfloat16", device="cpu")
    assert torch.equal(logits_of(rounded, PROMPT), logits_of(folder_bf16, PROMPT))
    assert rounded.weights_fingerprint == folder.weights_fingerprint
    assert rounded.config == folder.config
    assert rounded.config.eos_token_ids == (2,)
    assert rounded.config.max_model_len == 8192


def test_converted_tokenizer_is_that_of_the_gguf(converted: Path) -> None:
    path = smollm2_gguf()
    original = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == original.encode(text)
        assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "Hi 🙂"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == original.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.model_max_length == 8192


def test_converted_folder_states_eos_template_and_special_tokens(converted: Path) -> None:
    def content(name: str) -> Any:
        return json.loads((converted / name).read_text())

    assert content("generation_config.json")["eos_token_id"] == [2]
    assert content("config.json")["architectures"] == ["LlamaForCausalLM"]
    assert "<|im_start|>" in content("tokenizer_config.json")["chat_template"]
    assert content("special_tokens_map.json")["eos_token"] == "<|im_end|>"
    assert not converted.with_name("smollm2.partial").exists()


def test_conversion_reports_progress_and_never_overwrites(tmp_path: Path, converted: Path) -> None:
    seen: list[tuple[int, int]] = []
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", with_tokenizer=True)
    convert_gguf(gguf, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 30) for done in range(1, 31)]
    with pytest.raises(FileExistsError, match="folder must not exist yet"):
        convert_gguf(gguf, tmp_path / "out")


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama_tied", {}),
        ("llama_attention_bias", {}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("qwen2", {}),
        ("qwen3_tied", {}),
    ],
    ids=["llama", "llama_tied", "llama_attention_bias", "llama3_rope", "qwen2", "qwen3_tied"],
)
def test_gguf_and_folder_of_one_model_load_to_the_same_values(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """llama.cpp's row order of q and k is undone."""
    folder = save_tiny(family, tmp_path / "folder", **overrides)
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", family, **overrides)
    from_folder = load_model(folder, dtype="float32", device="cpu")
    from_gguf = load_model(gguf, dtype="float32", device="cpu")
    ids = list(range(40))
    assert torch.equal(logits_of(from_folder, ids), logits_of(from_gguf, ids))
    assert from_folder.weights_fingerprint == from_gguf.weights_fingerprint


def test_sharded_folder_equals_single_file(tmp_path: Path) -> None:
    single = load_model(save_tiny("qwen2", tmp_path / "single"), dtype="float32", device="cpu")
    build_tiny("qwen2").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    sharded = load_model(tmp_path / "sharded", dtype="float32", device="cpu")
    assert sharded.weights_fingerprint == single.weights_fingerprint
    ids = list(range(20))
    assert torch.equal(logits_of(single, ids), logits_of(sharded, ids))


def test_fingerprint_changes_with_the_values(tmp_path: Path) -> None:
    first = load_model(save_tiny("llama", tmp_path / "a", seed=0), dtype="float32", device="cpu")
    second = load_model(save_tiny("llama", tmp_path / "b", seed=1), dtype="float32", device="cpu")
    half = load_model(tmp_path / "a", dtype="bfloat16", device="cpu")
    assert first.weights_fingerprint != second.weights_fingerprint
    assert first.weights_fingerprint == half.weights_fingerprint


def edit_tensors(folder: Path, added: Mapping[str, torch.Tensor], *, drop: str = "") -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(drop, None)
    save_file({**tensors, **added}, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "m")
    edit_tensors(folder, {}, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UnsupportedModel, match=r"lacks 1 tensors.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, dtype="float32", device="cpu")


def test_unused_tensor_is_named_but_rotary_buffers_are_harmless(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "m")
    edit_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_model(folder, dtype="float32", device="cpu")
    edit_tensors(folder, {"model.layers.0.extra.weight": torch.ones(8)})
    with pytest.raises(UnsupportedModel, match=r"nothing uses.*model\.layers\.0\.extra\.weight"):
        load_model(folder, dtype="float32", device="cpu")


def test_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "m")
    edit_tensors(folder, {"model.norm.weight": torch.ones(63)})
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight must have shape \(64,\), got \(63,\)"):
        load_model(folder, dtype="float32", device="cpu")


def test_missing_files_and_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"folder or a \.gguf file"):
        load_model(tmp_path / "nowhere", dtype="float32", device="cpu")
    folder = save_tiny("llama", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"lacks the safetensors file .*model\.safetensors"):
        load_model(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", b"{", "must be JSON: "),
        ("config.json", b"[]", "must hold a JSON object, got a list"),
        ("generation_config.json", b"\xff", "must be JSON: "),
        ("model.safetensors", b"", "must be a whole safetensors file: "),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
            "must be a whole safetensors file: ",
        ),
        ("model.safetensors.index.json", b"{}", "must hold a weight_map"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(
    tmp_path: Path, file: str, content: bytes, complaint: str
) -> None:
    folder = save_tiny("llama", tmp_path / "m")
    (folder / file).write_bytes(content)
    with pytest.raises(UnsupportedModel, match=re.escape(f"{folder / file} {complaint}")):
        load_model(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_whose_download_broke_off_is_named(tmp_path: Path, kind: str, share: float) -> None:
    if kind == "gguf":
        path = file = write_tiny_gguf(tmp_path / "tiny.gguf")
    else:
        path = save_tiny("llama", tmp_path / "m")
        file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UnsupportedModel, match=re.escape(f"{file} must be a whole")):
        load_model(path, dtype="float32", device="cpu")


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be auto or one of .*, got 'int8'"):
        load_model(save_tiny("llama", tmp_path / "m"), dtype="int8", device="cpu")


def hf_config(**overrides: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        **overrides,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures must name one of .*GPT2LMHeadModel"),
        ({"architectures": []}, "architectures must name one of"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type must be .*got 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type must be .*got 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be an object, got 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide 4, got 3"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        model_config(hf_config(**overrides))


def test_both_spellings_of_rope_are_read() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = model_config(hf_config(rope_theta=5e5, rope_scaling=llama3))
    new = model_config(hf_config(rope_parameters={**llama3, "rope_theta": 5e5}))
    assert old == new
    assert old.rope == RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_len=128)
    assert old.max_model_len == 512


def test_linear_rope_scaling_stretches_the_model_length() -> None:
    config = model_config(hf_config(rope_scaling={"type": "linear", "factor": 4.0}))
    assert config.max_model_len == 2048


def test_windows_follow_the_family() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "max_window_layers": 3}
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 9}
    assert model_config(hf_config(**qwen)).windows == (None,) * 4
    assert model_config(hf_config(**qwen, use_sliding_window=True)).windows == (None, None, None, 9)
    assert model_config(hf_config(**mistral)).windows == (9,) * 4
    assert model_config(hf_config(sliding_window=9)).windows == (None,) * 4


def test_generation_config_decides_the_eos_ids() -> None:
    assert model_config(hf_config()).eos_token_ids == (2,)
    assert model_config(hf_config(), {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert model_config(hf_config(eos_token_id=None)).eos_token_ids == ()
