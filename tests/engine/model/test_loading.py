"""Checkpoints in every form are read in full or refused by the tensor's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine.errors import InvalidRequest
from engine.model.loading import LlamaWeights, load_weights
from engine.model.spec import load_model_spec
from engine.sharding import Shard, shard_shape
from tests.tiny import make_llama


def load(path: Path, dtype: torch.dtype = torch.float32) -> LlamaWeights:
    return load_weights(load_model_spec(str(path)), dtype)


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


def edit(path: Path, add: dict[str, torch.Tensor], remove: str = "") -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(remove, None)
    save_file(tensors | add, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_fused_weights_are_the_checkpoints(tmp_path: Path, tied: bool) -> None:
    model = LlamaForCausalLM.from_pretrained(make_llama(tmp_path, tie_word_embeddings=tied))
    weights = load(tmp_path)
    for got, want in zip(weights.layers, model.model.layers, strict=True):
        attention, mlp = want.self_attn, want.mlp
        got_qkv, got_o, got_gate_up, got_down = (unpacked(w) for w in (got.qkv, got.o, got.gate_up, got.down))
        qkv = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        assert torch.equal(got_qkv, torch.cat(qkv))
        assert torch.equal(got_gate_up, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        assert torch.equal(got_o, attention.o_proj.weight)
        assert torch.equal(got_down, mlp.down_proj.weight)
        assert torch.equal(got.input_norm, want.input_layernorm.weight)
        assert torch.equal(got.post_norm, want.post_attention_layernorm.weight)
    assert torch.equal(weights.embed, model.model.embed_tokens.weight)
    assert torch.equal(weights.final_norm, model.model.norm.weight)
    assert torch.equal(unpacked(weights.lm_head), model.lm_head.weight)


def test_sharded_equals_single(tmp_path: Path) -> None:
    single = make_llama(tmp_path / "single")
    model = LlamaForCausalLM.from_pretrained(single)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    a, b = load(single), load(tmp_path / "sharded")
    assert torch.equal(unpacked(a.lm_head), unpacked(b.lm_head))
    for one, other in zip(a.layers, b.layers, strict=True):
        assert torch.equal(unpacked(one.qkv), unpacked(other.qkv))
        assert torch.equal(unpacked(one.down), unpacked(other.down))


def test_weights_are_cast_once(tmp_path: Path) -> None:
    make_llama(tmp_path)
    wide, narrow = load(tmp_path), load(tmp_path, torch.bfloat16)
    assert narrow.layers[0].qkv.dtype == torch.bfloat16
    assert torch.equal(narrow.layers[0].qkv, unpacked(wide.layers[0].qkv).bfloat16())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    make_llama(tmp_path)
    edit(tmp_path, {}, remove=name)
    with pytest.raises(InvalidRequest) as error:
        load(tmp_path)
    assert error.value.param == name


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    make_llama(tmp_path)
    edit(tmp_path, {name: torch.zeros(64)})
    with pytest.raises(InvalidRequest) as error:
        load(tmp_path)
    assert error.value.param == name


def test_a_tensor_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    make_llama(tmp_path)
    edit(tmp_path, {name: torch.zeros(64, 64)})
    with pytest.raises(InvalidRequest) as error:
        load(tmp_path)
    assert error.value.param == name


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantised_weights_are_refused_at_the_start_also_if_the_config_hides_them(
    tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    """FR-44: without their scales they would be cast, and every answer be noise."""
    make_llama(tmp_path)
    weight = "model.layers.0.self_attn.q_proj.weight"
    edit(tmp_path, {weight: torch.zeros(64, 64).to(dtype)})
    with pytest.raises(InvalidRequest) as error:
        load(tmp_path)
    assert error.value.param == "model"
    assert name in error.value.message


def test_stored_rotary_buffers_and_a_second_tied_head_are_ignored(tmp_path: Path) -> None:
    make_llama(tmp_path, tie_word_embeddings=True)
    edit(
        tmp_path,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "lm_head.weight": torch.zeros(256, 64),
        },
    )
    weights = load(tmp_path)
    assert torch.equal(unpacked(weights.lm_head), weights.embed)
    assert weights.embed.abs().sum() > 0


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    make_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidRequest) as error:
        load(tmp_path)
    assert error.value.param == "model"


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_hold_all_weights_between_them(tmp_path: Path, tied: bool) -> None:
    path = make_llama(tmp_path, tie_word_embeddings=tied)
    spec = load_model_spec(str(path))
    whole = load_weights(spec, torch.float32)
    shape, num_ranks = spec.shape, 4
    parts = [shard_shape(shape, Shard(rank, num_ranks)) for rank in range(num_ranks)]
    weights = [load_weights(spec, torch.float32, shard=part.shard) for part in parts]
    for i, layer in enumerate(whole.layers):
        q, k, v = torch.split(unpacked(layer.qkv), [shape.q_size, shape.kv_size, shape.kv_size])
        gate, up = unpacked(layer.gate_up).chunk(2)
        for part, held in zip(parts, weights, strict=True):
            rows = [slice(p.start, p.end) for p in part.parts]
            expected = torch.cat([q[rows[0]], k[rows[1]], v[rows[2]]])
            assert torch.equal(unpacked(held.layers[i].qkv), expected)
            assert torch.equal(unpacked(held.layers[i].o), unpacked(layer.o)[:, rows[3]])
            assert torch.equal(unpacked(held.layers[i].gate_up), torch.cat([gate[rows[4]], up[rows[5]]]))
            assert torch.equal(unpacked(held.layers[i].down), unpacked(layer.down)[:, rows[6]])
    assert torch.equal(torch.cat([unpacked(held.lm_head) for held in weights]), unpacked(whole.lm_head))
