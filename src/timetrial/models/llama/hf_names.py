"""Names and shapes of a Llama's tensors in Hugging Face checkpoints, without torch.

| ours (`layers.N.`...)       | theirs (`model.layers.N.`...)           |
| --------------------------- | --------------------------------------- |
| attention.wq, wk, wv, wo    | self_attn.q_proj, k_proj, v_proj, o_proj |
| attention_norm, ffn_norm    | input_layernorm, post_attention_layernorm |
| feed_forward.w1, w3, w2     | mlp.gate_proj, up_proj, down_proj       |
| embed, norm (no layer)      | model.embed_tokens, model.norm          |
| head (no layer)             | lm_head; absent when tied               |
"""

from __future__ import annotations

from timetrial.models.llama.config import LlamaConfig

PARTS = {
    "embed": "embed_tokens", "head": "lm_head", "attention": "self_attn", "wq": "q_proj", "wk": "k_proj",
    "wv": "v_proj", "wo": "o_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
"""Parts of our names that are called otherwise there."""


def hf_name(name: str) -> str:
    """Their name of one of our modules or parameters."""
    theirs = ".".join(PARTS.get(part, part) for part in name.split("."))
    return theirs if theirs.startswith("lm_head") else f"model.{theirs}"


def plain_name(name: str) -> str:
    """The single-device model's name, without what wrappers and adapters put in between."""
    return ".".join(part for part in name.split(".") if not part.startswith("_") and part != "base")


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every tensor that a checkpoint holds, in the model's order."""
    norm_before = {"wq": "attention_norm", "w1": "ffn_norm", "head": "norm"}
    found: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, config.dim)}
    for name, shape in config.linears().items():
        *outer, leaf = name.split(".")
        if leaf in norm_before:
            found[".".join((*outer[:-1], norm_before[leaf], "weight"))] = (config.dim,)
        if leaf != "head" or not config.tied:
            found[f"{name}.weight"] = shape
    return found
