"""Model families of Hugging Face that no other test names, in tiny configurations with random weights.

Each entry returns a model in evaluation mode and the keywords of its call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Made = tuple[torch.nn.Module, dict[str, Any]]
WORDS = 96
SIZES: dict[str, Any] = dict(
    vocab_size=WORDS,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED: dict[str, Any] = dict(num_key_value_heads=2)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2)
VISION: dict[str, Any] = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
SPEECH: dict[str, Any] = dict(
    vocab_size=WORDS,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    conv_dim=(16, 16, 16),
    conv_stride=(5, 2, 2),
    conv_kernel=(10, 3, 3),
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
)
HALVES: dict[str, Any] = dict(  # an encoder and a decoder
    vocab_size=WORDS,
    d_model=64,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=64,
)


def ids(length: int = 11) -> Tensor:
    return torch.randint(3, WORDS, (2, length), generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def image(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": numbers(2, 3, size, size)}


def _family(name: str, kind: str, sizes: dict[str, Any], given: Callable[[], dict[str, Any]]) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        return getattr(transformers, name.removesuffix("Text") + kind)(config).eval(), given()

    return make


def decoder(name: str, **more: Any) -> Callable[[], Made]:
    return _family(name, "ForCausalLM", {**SIZES, **more}, lambda: {"input_ids": ids(), "use_cache": False})


def encoder(name: str, **more: Any) -> Callable[[], Made]:
    return _family(name, "Model", {**SIZES, **more}, lambda: {"input_ids": ids()})


def other(name: str, given: Callable[[], dict[str, Any]], kind: str = "Model", **sizes: Any) -> Callable[[], Made]:
    return _family(name, kind, sizes, given)


def text() -> dict[str, Any]:
    return {"input_ids": ids(), "use_cache": False}


def both() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids(5), "use_cache": False}


FAMILIES: dict[str, Callable[[], Made]] = {
    "gemma2": decoder("Gemma2", head_dim=16, sliding_window=8, **GROUPED),
    "phi": decoder("Phi"),
    "phi3": decoder("Phi3", **GROUPED),
    "falcon": decoder("Falcon", alibi=True, new_decoder_architecture=False),
    "mpt": other("Mpt", text, "ForCausalLM", d_model=64, n_heads=4, n_layers=2, vocab_size=WORDS, max_seq_len=64),
    "bloom": other("Bloom", text, "ForCausalLM", vocab_size=WORDS, hidden_size=64, n_layer=2, n_head=4),
    "opt": decoder("OPT", ffn_dim=96, word_embed_proj_dim=64),
    "gpt-neox": decoder("GPTNeoX"),
    "stablelm": decoder("StableLm", **GROUPED),
    "olmo2": decoder("Olmo2", **GROUPED),
    "qwen3": decoder("Qwen3", head_dim=16, **GROUPED),
    "qwen3 moe": decoder("Qwen3Moe", head_dim=16, moe_intermediate_size=32, **GROUPED, **EXPERTS),
    "cohere": decoder("Cohere", **GROUPED),
    "starcoder2": decoder("Starcoder2", **GROUPED),
    "granite": decoder("Granite", **GROUPED),
    "deepseek v3": decoder(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gpt-oss": decoder("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, **GROUPED),
    "nemotron": decoder("Nemotron", **GROUPED),
    "mamba": other("Mamba", text, "ForCausalLM", vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, state_size=8),
    "mamba2": other(
        "Mamba2",
        text,
        "ForCausalLM",
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=4,
    ),
    "lfm2": decoder("Lfm2", full_attn_idxs=[1], block_multiple_of=16, **GROUPED),
    "deberta v2": encoder("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "mpnet": encoder("MPNet"),
    "modernbert": encoder("ModernBert", global_attn_every_n_layers=2, local_attention=8),
    "roformer": encoder("RoFormer", embedding_size=64),
    "fnet": encoder("FNet"),
    "convbert": encoder("ConvBert", embedding_size=64),
    "longformer": encoder("Longformer", attention_window=4),
    "pegasus": other("Pegasus", both, **HALVES),
    "mbart": other("MBart", text, **HALVES),
    "beit": other("Beit", image, use_relative_position_bias=True, **VISION),
    "dinov2": other("Dinov2", image, **{k: v for k, v in VISION.items() if k != "intermediate_size"}),
    "regnet": other("RegNet", image, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    "segformer": other(
        "Segformer",
        image,
        "ForSemanticSegmentation",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
    ),
    "wav2vec2": other("Wav2Vec2", lambda: {"input_values": numbers(2, 800)}, **SPEECH),
    "hubert": other("Hubert", lambda: {"input_values": numbers(2, 800)}, **SPEECH),
    "siglip": other(
        "Siglip",
        lambda: {"input_ids": ids(), **image()},
        text_config={key: value for key, value in SIZES.items() if "token" not in key},
        vision_config=VISION,
    ),
    "patchtst": other(
        "PatchTST",
        lambda: {"past_values": numbers(2, 32, 3)},
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=48,
        num_hidden_layers=2,
    ),
}
