"""A converted checkpoint computes what its GGUF file does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from gguf import TokenType
from real_models.checkpoint import write_checkpoint
from real_models.gguf_file import GgufFile
from real_models.trouble import ModelTrouble

from support.gguf_files import llama_logits, write_gemma3, write_llama

IDS = [5, 77, 130, 12, 200, 201, 202, 9, 33, 250, 8, 8]


def converted(source: Path, folder: Path) -> Path:
    folder.mkdir()
    write_checkpoint(GgufFile(source), folder)
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def test_llama_as_llama_cpp_computes_it(tmp_path: Path) -> None:
    file = GgufFile(write_llama(tmp_path / "tiny.gguf"))
    rounded = {name: torch.from_numpy(file.tensor(name)).bfloat16().float() for name in file.names()}
    expected = llama_logits(rounded.__getitem__, IDS)
    got = logits_of(converted(tmp_path / "tiny.gguf", tmp_path / "model"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_gemma3_as_transformers_computes_it(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,  # one of full attention among windows
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=4,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = Gemma3ForCausalLM(config)
    for name, values in model.named_parameters():
        # What a checkpoint in bfloat16 can hold; a norm in GGUF is one more.
        is_norm = name.endswith("norm.weight")
        values.data = torch.randint(-32, 32, values.shape) / 64 if is_norm else values.data.bfloat16().float()
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [chr(0x4E00 + at) for at in range(300 - len(pieces))]
    kinds = [TokenType.CONTROL] * 4 + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * 40
    write_gemma3(tmp_path / "tiny.gguf", model, pieces, [0.0] * 300, kinds)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    got = logits_of(converted(tmp_path / "tiny.gguf", tmp_path / "model"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_an_answer_ends_where_the_file_says(tmp_path: Path) -> None:
    folder = converted(write_llama(tmp_path / "tiny.gguf", eos="<|im_end|>"), tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == 2
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("missing", ["an architecture", "a way to split text"])
def test_what_cannot_be_converted_is_named(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "other.gguf"
    if missing == "an architecture":
        writer = gguf.GGUFWriter(path, "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        named = "general.architecture is mamba: only llama, gemma3"
    else:
        write_llama(path, pre="qwen2")
        named = "tokenizer.ggml.pre is qwen2: only smollm"
    with pytest.raises(ModelTrouble, match=named):
        write_checkpoint(GgufFile(path), tmp_path)
