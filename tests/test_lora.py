"""Low-rank adapters: what they compute, what they leave alone, and their files."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from timetrial.config import Lora, replace
from timetrial.errors import UserError
from timetrial.models import lora
from timetrial.models.llama import hf
from timetrial.models.llama.config import LlamaConfig
from timetrial.models.llama.model import Llama
from timetrial.models.lora_targets import lora_params
from timetrial.precision import bf16

CONFIG = LlamaConfig(vocab_size=101, dim=64, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=176)
LLAMA_2_70B = LlamaConfig(32_000, 8192, 80, 64, 8, 28_672, rope_theta=10_000.0)
REFERENCE = Lora(rank=16, alpha=32.0, dropout=0.1, targets=("wqkv", "wo"))
SEPARATE = replace(REFERENCE, targets=("wq", "wk", "wv", "wo"))
EVERYTHING = replace(REFERENCE, rank=4, targets=("w1", "w2", "w3", "wqkv", "wo", "head"))

every_kind = pytest.mark.parametrize("settings", [REFERENCE, SEPARATE, EVERYTHING], ids=["shared", "separate", "all"])


def llama(config: LlamaConfig = CONFIG, seed: int = 1) -> Llama:
    model = Llama(config)
    model.init_weights(seed)
    return model


def adapted(settings: Lora = REFERENCE, trained: bool = True) -> Llama:
    """A model with adapters, `trained` ones far from their start."""
    model = llama()
    lora.apply(model, settings, seed=1)
    if trained:
        torch.manual_seed(4)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                nn.init.normal_(parameter, std=0.05)
    return model.eval()


def tokens(length: int = 30) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, length), generator=torch.Generator().manual_seed(3))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        (LLAMA_2_70B, REFERENCE, 44_564_480),  # 80 layers of 16 (8,192 + 10,240) and 16 (8,192 + 8,192)
        (LLAMA_2_70B, SEPARATE, 65_536_000),
        (CONFIG, EVERYTHING, None),
    ],
)
def test_adapter_parameters_are_those_of_the_closed_form(
    config: LlamaConfig, settings: Lora, expected: int | None
) -> None:
    with torch.device("meta"):
        model = Llama(config)
        lora.apply(model, settings, seed=1)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == lora_params(config, settings)
    assert expected is None or trained == expected
    assert sum(p.numel() for p in model.parameters()) == config.n_params() + trained


# ---- what it computes ----------------------------------------------------------------------------


@every_kind
def test_training_starts_from_the_pretrained_model(settings: Lora) -> None:
    before = llama()(tokens())
    model = adapted(settings, trained=False)
    assert torch.equal(model.train()(tokens()), before)


def test_an_adapter_adds_its_product() -> None:
    base = nn.Linear(20, 30)
    layer = lora.LoraLinear(copy.deepcopy(base), Lora(rank=5, alpha=8.0, dropout=0.0))
    nn.init.normal_(layer.lora_a)
    nn.init.normal_(layer.lora_b)
    x = torch.randn(2, 7, 20)
    w, b = base.weight.double(), base.bias.double()
    weight = w + 8.0 / 5 * layer.lora_b.double() @ layer.lora_a.double()
    assert relative(layer(x).double(), x.double() @ weight.T + b) < 1e-6


def test_a_group_computes_what_one_joined_layer_would() -> None:
    """Query, key and value as one matrix with one adapter, as in the reference: same drops, same gradients."""
    attention = adapted(replace(REFERENCE, dropout=0.4)).train().layers["0"].attention
    parts = (attention.wq, attention.wk, attention.wv)
    joined = nn.Linear(64, 64 + 16 + 16, bias=False)
    one = lora.LoraLinear(joined, replace(REFERENCE, dropout=0.4))
    with torch.no_grad():
        joined.weight.copy_(torch.cat([part.base.weight for part in parts]))
        one.lora_a.copy_(attention.wq.lora_a)
        one.lora_b.copy_(torch.cat([part.lora_b for part in parts]))
    x = torch.randn(2, 9, 64)
    torch.manual_seed(7)
    found = torch.cat(attention.qkv(x, *parts), dim=-1)
    torch.manual_seed(7)
    expected = one(x)
    assert relative(found, expected) < 1e-6
    found.square().sum().backward()
    expected.square().sum().backward()
    assert relative(attention.wq.lora_a.grad, one.lora_a.grad) < 1e-5
    assert relative(torch.cat([part.lora_b.grad for part in parts]), one.lora_b.grad) < 1e-5
    assert attention.wk.lora_a is attention.wv.lora_a is None


def test_dropout_follows_torchs_generator_and_only_training() -> None:
    layer = lora.LoraLinear(nn.Linear(400, 1), Lora(rank=400, alpha=400.0, dropout=0.3))
    with torch.no_grad():
        layer.lora_a.copy_(torch.eye(400))
    x = torch.ones(50, 400)

    def down(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return layer.down(x)

    dropped = down(1)
    assert torch.equal(dropped, down(1))
    assert not torch.equal(dropped, down(2))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    share = (dropped == 0).float().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / dropped.numel())
    layer.eval()
    assert torch.equal(down(1), x)


@every_kind
def test_only_adapters_get_gradients(settings: Lora) -> None:
    model = adapted(settings).train()
    F.cross_entropy(model(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        ours = name.rpartition(".")[2] in ("lora_a", "lora_b")
        assert parameter.requires_grad == ours, name
        assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) == ours, name


@every_kind
def test_merged_weights_compute_the_same(settings: Lora) -> None:
    model = adapted(settings)
    before, plain = model(tokens()), llama()
    lora.merge(model)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert relative(model(tokens()), before) < 5e-6
    assert relative(plain(tokens()), before) > 1e-2
    lora.apply(model, settings, seed=2)  # and once more on top
    assert relative(model(tokens()), before) < 5e-6


@every_kind
def test_merged_model_is_written_and_read(settings: Lora, tmp_path: Path) -> None:
    model = adapted(settings)
    with pytest.raises(UserError, match="merge them first"):
        hf.save(model, tmp_path / "c")
    lora.merge(model)
    hf.save(model, tmp_path / "c")
    again = Llama(CONFIG)
    hf.load(again, tmp_path / "c")
    assert torch.equal(again(tokens()), model(tokens()))


def test_pretrained_weights_may_come_before_the_adapters_or_after(tmp_path: Path) -> None:
    hf.save(llama(seed=9), tmp_path / "c")
    before, after = llama(), llama()
    hf.load(before, tmp_path / "c")
    lora.apply(before, REFERENCE, seed=1)
    lora.apply(after, REFERENCE, seed=1)
    hf.load(after, tmp_path / "c")
    found, expected = after.state_dict(), before.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_adapters_of_a_bfloat16_layer_give_its_type() -> None:
    """On a GPU a layer that multiplies in bfloat16 gives bfloat16 while its adapter is float32."""
    layer = lora.LoraLinear(nn.Linear(16, 16).bfloat16(), REFERENCE)
    layer.lora_a, layer.lora_b = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))
    assert layer(torch.randn(3, 16).bfloat16()).dtype == torch.bfloat16
    model = adapted()
    expected = model(tokens())
    bf16.convert(model)
    assert 0.0 < relative(model(tokens()), expected) < 0.1


# ---- first values --------------------------------------------------------------------------------


def test_first_values_are_kaimings_and_zero() -> None:
    for name, parameter in adapted(trained=False).named_parameters():
        if name.endswith("lora_b"):
            assert not parameter.any()
        elif name.endswith("lora_a"):
            bound = 1.0 / math.sqrt(64)
            drawn = torch.empty(16, 64)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # as PEFT does; for its bounds
            assert abs(drawn.abs().max() - bound) < 0.01 * bound
            assert 0.97 * bound < parameter.abs().max() <= bound
            assert abs(parameter.std() - bound / math.sqrt(3)) < 0.05 * bound
            assert abs(parameter.mean()) < 0.1 * bound


def test_first_values_depend_on_seed_and_name_alone() -> None:
    few, many, other = llama(), llama(), llama()
    lora.apply(few, replace(REFERENCE, targets=("wo",)), seed=1)
    torch.manual_seed(99)
    lora.apply(many, replace(SEPARATE, targets=("w2", "wo", "wq")), seed=1)
    lora.apply(other, replace(REFERENCE, targets=("wo",)), seed=2)
    name = "layers.2.attention.wo.lora_a"
    assert torch.equal(few.get_parameter(name), many.get_parameter(name))
    assert not torch.equal(few.get_parameter(name), other.get_parameter(name))
    assert not torch.equal(few.get_parameter(name), few.get_parameter(name.replace("2", "1")))


def test_meta_model_gets_its_values_later() -> None:
    with torch.device("meta"):
        model = Llama(CONFIG)
        lora.apply(model, REFERENCE, seed=1)
    model.to_empty(device="cpu")
    lora.init_adapters(model, seed=1)
    expected = adapted(trained=False)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            assert torch.equal(parameter, expected.get_parameter(name)), name


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": ("wqv",)}, "no linear layer is called 'wqv', did you mean wqkv"),
        ({"targets": ("wq", "q_proj")}, "no linear layer is called 'q_proj', did you mean wq?"),
        ({"targets": ("norm",)}, "no linear layer is called 'norm'; there are wq, wk, wv, wo, w1, w2, w3, head, wqkv"),
        ({"targets": ()}, "lora.targets is empty"),
        ({"targets": ("wqkv", "wk")}, "wk would get two adapters"),
        ({"targets": ("wo", "wo")}, "wo would get two adapters"),
        ({"rank": 0}, "lora.rank=0"),
        ({"dropout": 1.0}, "lora.dropout=1.0"),
        ({"dropout": -0.1}, "lora.dropout=-0.1"),
    ],
)
def test_settings_that_cannot_work_are_refused_and_change_nothing(change: dict[str, Any], words: str) -> None:
    model = llama()
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        lora.apply(model, replace(REFERENCE, **change), seed=1)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(isinstance(m, lora.LoraLinear) for m in model.modules())


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(UserError, match="head shares its weight with the embedding"):
        lora.apply(llama(replace(CONFIG, tied=True)), EVERYTHING, seed=1)
    with pytest.raises(UserError, match="has adapters already"):
        lora.apply(adapted(), REFERENCE, seed=1)


# ---- files ---------------------------------------------------------------------------------------


def test_files_have_pefts_names(tmp_path: Path) -> None:
    model = adapted()
    lora.save_adapters(model, tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    modules = [f"{prefix}.{i}.self_attn.{part}_proj" for i in range(3) for part in "qkvo"]
    assert set(state) == {f"{module}.lora_{x}.weight" for module in modules for x in "AB"}
    attention = model.layers["1"].attention
    assert torch.equal(state[f"{prefix}.1.self_attn.k_proj.lora_A.weight"], attention.wq.lora_a)
    assert torch.equal(state[f"{prefix}.1.self_attn.k_proj.lora_B.weight"], attention.wk.lora_b)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (16, 32, 0.1)
    assert (settings["peft_type"], settings["task_type"], settings["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    head = lora.adapter_state(adapted(EVERYTHING))
    assert "base_model.model.lm_head.lora_A.weight" in head
    assert "base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight" in head


@every_kind
def test_peft_computes_the_same_from_our_files(settings: Lora, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is the oracle here and is not installed")
    transformers = pytest.importorskip("transformers")
    hf.save(llama(), tmp_path / "base")
    model = adapted(settings)
    lora.save_adapters(model, tmp_path / "adapters")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    oracle = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    assert relative(oracle(tokens()).logits, model(tokens())) < 5e-6
    oracle.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    again = adapted(settings, trained=False)
    lora.load_adapters(again, tmp_path / "theirs")
    assert torch.equal(again(tokens()), model(tokens()))


@every_kind
def test_adapters_survive_their_files(settings: Lora, tmp_path: Path) -> None:
    model = adapted(settings)
    lora.save_adapters(adapted(settings, trained=False), tmp_path)
    lora.save_adapters(model, tmp_path)  # in the place of the older ones
    again = adapted(settings, trained=False)
    lora.load_adapters(again, tmp_path)
    assert torch.equal(again(tokens()), model(tokens()))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_one_a_may_be_read_as_three(tmp_path: Path) -> None:
    model, separate = adapted(REFERENCE), adapted(SEPARATE, trained=False)
    lora.save_adapters(model, tmp_path)
    lora.load_adapters(separate, tmp_path)
    assert relative(separate(tokens()), model(tokens())) < 1e-6


def test_wrapped_blocks_keep_their_names(tmp_path: Path) -> None:
    model = adapted()
    expected, before = lora.adapter_state(model), model(tokens())
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, checkpoint_wrapper(block))
    found = lora.adapter_state(model)
    assert found.keys() == expected.keys()
    lora.merge(model)
    hf.save(model, tmp_path / "c")
    again = Llama(CONFIG)
    hf.load(again, tmp_path / "c")
    assert relative(again(tokens()), before) < 5e-6


def edit(file: Path, **change: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / lora.WEIGHTS)
    change(tensors)
    save_file(tensors, directory / lora.WEIGHTS)


KEY = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (lambda d: edit(d / lora.SETTINGS, r=8), "r is 8, the model's is 16; set lora.rank"),
    "alpha": (lambda d: edit(d / lora.SETTINGS, lora_alpha=16), "lora_alpha is 16, the model's is 32"),
    "method": (lambda d: edit(d / lora.SETTINGS, peft_type="IA3"), "peft_type is 'IA3'"),
    "dora": (lambda d: edit(d / lora.SETTINGS, use_dora=True), "use_dora is True"),
    "bias": (lambda d: edit(d / lora.SETTINGS, bias="all"), "bias is 'all'"),
    "no settings": (lambda d: (d / lora.SETTINGS).unlink(), "adapter_config.json: no such file"),
    "no weights": (lambda d: (d / lora.WEIGHTS).unlink(), "adapter_model.safetensors: no such file"),
    "cut short": (
        lambda d: (d / lora.WEIGHTS).write_bytes((d / lora.WEIGHTS).read_bytes()[:-1]),
        "adapter_model.safetensors: is damaged or cut short",
    ),
    "missing": (lambda d: edit_weights(d, lambda t: t.pop(f"{KEY}B.weight")), f"has no tensor {KEY}B.weight"),
    "misshapen": (
        lambda d: edit_weights(d, lambda t: t.update({f"{KEY}B.weight": torch.zeros(64, 16)})),
        rf"{KEY}B.weight has shape \[64, 16\], the model needs \[16, 16\]",
    ),
    "unexpected": (
        lambda d: edit_weights(d, lambda t: t.update({KEY.replace("k_", "z_") + "A.weight": torch.zeros(1)})),
        "z_proj.lora_A.weight, which the model has not",
    ),
    "not shared": (
        lambda d: edit_weights(d, lambda t: t[f"{KEY}A.weight"].add_(1.0)),
        f"{KEY}A.weight differs from that of q_proj",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_files_are_one_clear_line_and_change_nothing(fault: str, tmp_path: Path) -> None:
    spoil, words = FAULTS[fault]
    lora.save_adapters(adapted(), tmp_path)
    spoil(tmp_path)
    model = adapted(trained=False)
    with pytest.raises(UserError, match=words) as caught:
        lora.load_adapters(model, tmp_path)
    assert "\n" not in str(caught.value)
    expected = adapted(trained=False)
    assert all(torch.equal(p, expected.get_parameter(name)) for name, p in model.named_parameters())


def test_files_need_adapters_and_a_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapters to save"):
        lora.save_adapters(llama(), tmp_path / "a")
    with pytest.raises(UserError, match="no adapters to fill"):
        lora.load_adapters(llama(), tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        lora.save_adapters(adapted(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
