"""Hugging Face checkpoints: transformers reads what we write, we read what it writes, nothing else passes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from timetrial.config import replace
from timetrial.errors import RunFailed, UserError
from timetrial.models.layers.config import RopeScaling
from timetrial.models.layers.rope import frequencies
from timetrial.models.llama import hf
from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.hf_config import from_hf, to_hf
from timetrial.models.llama.model import Llama

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here: pip install .[dev]")

STRETCH = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=64)
GQA = LlamaConfig(vocab_size=101, dim=64, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=176)
SHAPES = {
    "mha": replace(GQA, n_kv_heads=8, rope_theta=10_000.0, norm_eps=1e-6),
    "gqa": GQA,
    "one kv head, odd sizes": LlamaConfig(
        vocab_size=37, dim=30, n_layers=1, n_heads=3, n_kv_heads=1, ffn_dim=41, init_std=0.1
    ),
    "tied": replace(GQA, tied=True, init_std=0.1),
    "stretched": replace(GQA, rope_scaling=STRETCH),
}

# Where both do the same operations in the same order the logits are the same bits; a float32 product may
# be summed in another order on another machine, hence 2e-6 of the largest logit. Gradients add up more.
LOGITS, GRADIENTS = 2e-6, 1e-5


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def config(request: pytest.FixtureRequest) -> LlamaConfig:
    return request.param


def llama(config: LlamaConfig, seed: int = 1) -> Llama:
    model = Llama(config)
    model.init_weights(seed)
    return model


def theirs(config: LlamaConfig, seed: int = 0) -> Any:
    """A random model of transformers, its norms not all ones."""
    values = to_hf(config, "float32")
    del values["dtype"], values["torch_dtype"]
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def tokens(config: LlamaConfig, length: int = 200) -> Tensor:
    return torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(3))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def weights(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors*")}


def checkpoint(path: Path, config: LlamaConfig = GQA) -> Path:
    hf.save(llama(config), path)
    return path


# ---- with transformers ---------------------------------------------------------------------------


def test_their_weights_give_their_logits_and_gradients(config: LlamaConfig, tmp_path: Path) -> None:
    oracle = theirs(config)
    oracle.save_pretrained(tmp_path)
    assert hf.read_config(tmp_path) == config
    model = Llama(config)
    hf.load(model, tmp_path)
    batch = tokens(config)
    logits, expected = model(batch), oracle(batch).logits
    assert relative(logits, expected) <= LOGITS
    for found in (logits, expected):
        F.cross_entropy(found[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    grads = {name: p.grad for name, p in oracle.named_parameters()}
    found_names = {hf.hf_name(name) for name, _ in model.named_parameters()}
    assert found_names == set(grads)
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, grads[hf.hf_name(name)]) <= GRADIENTS, name


def test_they_read_what_we_write(config: LlamaConfig, tmp_path: Path) -> None:
    model = llama(config)
    hf.save(model, tmp_path / "ours")
    oracle = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert oracle.dtype == torch.float32
    assert relative(oracle(tokens(config)).logits, model(tokens(config))) <= LOGITS
    oracle.save_pretrained(tmp_path / "theirs")
    assert weights(tmp_path / "theirs") == weights(tmp_path / "ours")


def test_far_positions_turn_by_the_same_angles(tmp_path: Path) -> None:
    """Frequencies are the same bits, so a hundred thousand tokens on the angles still agree."""
    for scaling in (None, STRETCH, RopeScaling()):
        config = replace(GQA, rope_scaling=scaling)
        oracle = theirs(config)
        found = frequencies(config.head_dim, config.rope_theta, scaling)
        assert torch.equal(found, oracle.model.rotary_emb.inv_freq)
        oracle.save_pretrained(tmp_path / str(scaling))
        model = Llama(config)
        hf.load(model, tmp_path / str(scaling))
        positions = torch.arange(100_000, 100_050)
        expected = oracle(tokens(config, 50), position_ids=positions[None]).logits
        assert relative(model(tokens(config, 50), positions), expected) <= LOGITS


def test_bfloat16_shards_are_read_by_both(config: LlamaConfig, tmp_path: Path) -> None:
    model, limit = llama(config), config.n_params() // 2
    hf.save(model, tmp_path / "ours", dtype=torch.bfloat16, shard_bytes=limit)
    index = json.loads((tmp_path / "ours" / hf.INDEX).read_text())
    files = weights(tmp_path / "ours")
    assert set(index["weight_map"].values()) == set(files) - {hf.INDEX}
    assert index["metadata"] == {"total_parameters": config.n_params(), "total_size": 2 * config.n_params()}
    for file in set(index["weight_map"].values()):
        inside = load_file(tmp_path / "ours" / file)
        assert len(inside) == 1 or sum(t.numel() * 2 for t in inside.values()) <= limit
    oracle = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert oracle.dtype == torch.bfloat16
    again = Llama(config)
    hf.load(again, tmp_path / "ours")
    for name, parameter in again.named_parameters():
        expected = dict(model.named_parameters())[name].bfloat16()
        assert torch.equal(parameter, expected.float()), name
        assert torch.equal(oracle.get_parameter(hf.hf_name(name)), expected), name
    hf.save(again, tmp_path / "again", dtype=torch.bfloat16, shard_bytes=limit)
    assert weights(tmp_path / "again") == files


def test_their_shards_are_read(tmp_path: Path) -> None:
    oracle = theirs(GQA)
    oracle.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(weights(tmp_path / "theirs")) > 3
    model = Llama(GQA)
    hf.load(model, tmp_path / "theirs")
    assert all(torch.equal(p, oracle.get_parameter(hf.hf_name(name))) for name, p in model.named_parameters())


# ---- config.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["transformers 5", "transformers 4", "older"])
def test_rope_settings_of_every_generation_are_read(layout: str) -> None:
    config = replace(GQA, rope_scaling=STRETCH, rope_theta=123_456.0)
    values = transformers.LlamaConfig(**to_hf(config, "float32")).to_dict()
    assert "rope_scaling" not in values
    assert from_hf(values) == config
    if layout != "transformers 5":
        values["rope_scaling"] = values.pop("rope_parameters")
        values["rope_theta"] = values["rope_scaling"].pop("rope_theta")
    if layout == "older":
        values["rope_scaling"]["type"] = values["rope_scaling"].pop("rope_type")
    assert from_hf(values) == config


def test_config_survives_both_ways(config: LlamaConfig) -> None:
    values = json.loads(json.dumps(to_hf(config, "float32")))
    assert from_hf(values) == config
    again = transformers.LlamaConfig(**values).to_dict()
    assert from_hf(json.loads(json.dumps(again))) == config


def test_absent_settings_mean_what_they_mean_to_transformers() -> None:
    values = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }  # fmt: skip
    assert from_hf(values) == from_hf(transformers.LlamaConfig(**values).to_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lack low_freq_factor"),
        ({"hidden_size": 65}, "not a multiple"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    ],
)
def test_what_this_model_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        from_hf({**to_hf(GQA, "float32"), **change}, "dir/config.json")
    assert str(caught.value).startswith("dir/config.json: ")
    assert "\n" not in str(caught.value)


# ---- loading into models -------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_meta_gets_its_memory_while_loading(tied: bool, tmp_path: Path) -> None:
    config = replace(GQA, tied=tied)
    checkpoint(tmp_path / "c", config)
    with torch.device("meta"):
        model = Llama(config).to(torch.bfloat16)
    model.norm.requires_grad_(False)
    hf.load(model, tmp_path / "c")
    assert not any(p.is_meta for p in model.parameters())
    assert (model.head.weight is model.embed.weight) == tied
    expected = dict(llama(config).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad == (name != "norm.weight")
        assert torch.equal(parameter, expected[name].bfloat16()), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_stage_takes_its_part(tied: bool, tmp_path: Path) -> None:
    config = replace(GQA, tied=tied)
    checkpoint(tmp_path / "c", config)
    stage = Llama(config)
    stage.embed = None
    del stage.layers["0"]
    hf.load(stage, tmp_path / "c")
    whole = llama(config)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


def test_a_tied_checkpoint_may_hold_the_head_as_well(tmp_path: Path) -> None:
    config = replace(GQA, tied=True)
    edit_weights(checkpoint(tmp_path / "c", config), lambda t: t.update({"lm_head.weight": torch.zeros(101, 64)}))
    model = Llama(config)
    hf.load(model, tmp_path / "c")
    assert torch.equal(model.head.weight, llama(config).embed.weight)


def test_joined_query_key_value_of_the_lora_reference(tmp_path: Path) -> None:
    """Its checkpoint holds [q; k; v] as one matrix, and its config.json another model_type."""
    checkpoint(tmp_path / "c")
    tensors = load_file(tmp_path / "c" / hf.WEIGHTS)
    for i in range(GQA.n_layers):
        parts = [tensors.pop(f"model.layers.{i}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "c" / hf.WEIGHTS, metadata={"format": "pt"})
    values = json.loads((tmp_path / "c" / hf.CONFIG).read_text())
    values |= {"model_type": "custom_llama", "architectures": ["CustomLlamaForCausalLM"]}
    (tmp_path / "c" / hf.CONFIG).write_text(json.dumps(values))
    model = Llama(GQA)
    hf.load(model, tmp_path / "c")
    assert all(torch.equal(p, llama(GQA).get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize("vocab_size", [128, 90])
def test_another_vocabulary_only_when_asked(vocab_size: int, tmp_path: Path) -> None:
    checkpoint(tmp_path / "c")
    model, before = llama(replace(GQA, vocab_size=vocab_size), seed=5), llama(GQA)
    with pytest.raises(UserError, match=rf"embed_tokens.weight has shape \[101, 64\], .* \[{vocab_size}, 64\]"):
        hf.load(model, tmp_path / "c")
    hf.load(model, tmp_path / "c", resize_vocab=True)
    kept = min(vocab_size, GQA.vocab_size)
    batch = tokens(GQA) % kept
    assert relative(model(batch)[..., :kept], before(batch)[..., :kept]) <= LOGITS
    assert not model.embed.weight[kept:].any()
    assert not model.head.weight[kept:].any()


def test_put_decides_how_a_tensor_gets_into_a_parameter(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c")
    model, seen = Llama(GQA), {}
    hf.load(model, tmp_path / "c", put=lambda parameter, tensor: seen.update({parameter: tensor.clone()}))
    expected = llama(GQA)
    assert len(seen) == len(list(model.parameters()))
    assert all(torch.equal(seen[p], expected.get_parameter(name)) for name, p in model.named_parameters())


# ---- refusals ------------------------------------------------------------------------------------


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / hf.WEIGHTS)
    change(tensors)
    save_file(tensors, directory / hf.WEIGHTS)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


UP = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda d: cut_short(d / hf.WEIGHTS), "model.safetensors: is damaged or cut short"),
    "empty file": (lambda d: (d / hf.WEIGHTS).write_bytes(b""), "model.safetensors: is damaged or cut short"),
    "other file": (lambda d: (d / hf.WEIGHTS).write_bytes(b"x" * 999), "model.safetensors: is damaged or cut short"),
    "no weights": (lambda d: (d / hf.WEIGHTS).unlink(), "has neither model.safetensors nor"),
    "no config": (lambda d: (d / hf.CONFIG).unlink(), "config.json: no such file"),
    "config no json": (lambda d: (d / hf.CONFIG).write_text("{"), "config.json: is not JSON"),
    "config no object": (lambda d: (d / hf.CONFIG).write_text("[]"), "config.json: holds no JSON object"),
    "mistral": (lambda d: edit(d / hf.CONFIG, lambda c: c.update(model_type="mistral")), "model_type is 'mistral'"),
    "no directory": (shutil.rmtree, "no such directory"),
    "missing": (
        lambda d: edit_weights(d, lambda t: t.pop(UP)),
        rf"has no tensor {UP}, which the model needs with shape \[176, 64\]",
    ),
    "misshapen": (
        lambda d: edit_weights(d, lambda t: t.update({UP: torch.zeros(64, 176)})),
        rf"{UP} has shape \[64, 176\], the model needs \[176, 64\]",
    ),
    "unexpected": (
        lambda d: edit_weights(d, lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(176, 64)})),
        r"has a tensor model.layers.3.mlp.up_proj.weight of shape \[176, 64\], which the model has not",
    ),
    "integers": (
        lambda d: edit_weights(d, lambda t: t.update({UP: torch.zeros(176, 64, dtype=torch.int8)})),
        f"{UP} is of type I8",
    ),
    "heads": (
        lambda d: edit(d / hf.CONFIG, lambda c: c.update(num_attention_heads=4, num_key_value_heads=1, head_dim=16)),
        "n_heads is 4, the model's is 8",
    ),
    "theta": (lambda d: edit(d / hf.CONFIG, lambda c: c.update(rope_theta=1e4)), "rope_theta is 10000.0"),
    "eps": (lambda d: edit(d / hf.CONFIG, lambda c: c.update(rms_norm_eps=1e-6)), "norm_eps is 1e-06"),
    "tied": (lambda d: edit(d / hf.CONFIG, lambda c: c.update(tie_word_embeddings=True)), "tied is True"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_checkpoint_is_one_clear_line_and_changes_nothing(fault: str, tmp_path: Path) -> None:
    spoil, words = FAULTS[fault]
    spoil(checkpoint(tmp_path / "c"))
    model, before = llama(GQA, seed=2), llama(GQA, seed=2)
    with pytest.raises(UserError, match=words) as caught:
        hf.load(model, tmp_path / "c")
    assert str(caught.value).startswith(str(tmp_path / "c"))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(p, before.get_parameter(name)) for name, p in model.named_parameters())


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    hf.save(llama(GQA), tmp_path / "c", shard_bytes=60_000)
    (tmp_path / "c" / "model-00002-of-00014.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00014.safetensors: no such file, though the index names it"):
        hf.load(Llama(GQA), tmp_path / "c")
    edit(tmp_path / "c" / hf.INDEX, lambda index: index.pop("weight_map"))
    with pytest.raises(UserError, match="has no weight_map"):
        hf.load(Llama(GQA), tmp_path / "c")


def test_nothing_stands_where_writing_failed(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in hf.shapes(GQA).items()}

    def breaks(name: str) -> Tensor:
        if name == "layers.2.ffn_norm.weight":
            raise OSError(28, "No space left on device")
        return tensors[name]

    with pytest.raises(RunFailed, match=r"cannot be written .*No space left"):
        hf.write(tmp_path / "c", GQA, breaks, torch.float32, shard_bytes=60_000)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the write itself fails."""
    code = (
        "import resource, sys\n"
        "from timetrial.errors import RunFailed\n"
        "from timetrial.models.llama import hf, model, config\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    hf.save(model.Llama(config.LlamaConfig(101, 64, 3, 8, 2, 176)), sys.argv[1])\n"
        "except RunFailed as error:\n"
        "    sys.exit(f'failed: {error}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"failed: {tmp_path / 'c'}: cannot be written (")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_writing_spares_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    checkpoint(tmp_path / "c")  # an empty directory is as good as none
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path / "c", tmp_path / "file"):
        with pytest.raises(UserError, match="no empty directory"):
            hf.save(llama(GQA, seed=2), taken)
    assert (tmp_path / "file").read_text() == "mine"
    hf.load(model := Llama(GQA), tmp_path / "c")
    assert torch.equal(model.head.weight, llama(GQA).head.weight)
    with pytest.raises(UserError, match=r"cannot be written as torch.int8"):
        hf.save(llama(GQA), tmp_path / "d", dtype=torch.int8)


# ---- memory --------------------------------------------------------------------------------------

BIG = LlamaConfig(vocab_size=1000, dim=512, n_layers=6, n_heads=8, n_kv_heads=8, ffn_dim=2048)
LARGEST = 4 * 2048 * 512  # bytes


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc to read its own memory")
def test_loading_and_saving_hold_no_second_model(tmp_path: Path) -> None:
    model, peak = llama(BIG), 0
    allowed = BIG.n_params()  # a quarter of the float32 model

    def watch() -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    def fetch_and_watch(name: str) -> Tensor:
        watch()
        return model.get_parameter(name)

    before = anonymous_bytes()
    hf.write(tmp_path / "c", BIG, fetch_and_watch, torch.bfloat16, shard_bytes=2 * LARGEST)
    assert peak - before < allowed

    def copy_and_watch(parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.copy_(tensor)
        watch()

    before = peak = anonymous_bytes()
    hf.load(model, tmp_path / "c", put=copy_and_watch)
    assert peak - before < allowed
