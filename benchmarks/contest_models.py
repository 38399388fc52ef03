"""The small models of contest.py: Hugging Face models in small configurations with random weights, and a few of our
own.

make(name) returns a module and its keyword arguments. Sizes are chosen so that a call takes one to some ten
milliseconds, where the overhead around the kernels still counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "compile"))

import models as written

Made = tuple[nn.Module, dict[str, Any]]
VOCABULARY = 1000


def _hf() -> Any:
    import transformers

    return transformers


def _ids(rows: int = 1, positions: int = 32) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, positions))


def _encoder(kind: str, **more: Any) -> Made:
    hf = _hf()
    config = getattr(hf, f"{kind}Config")(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        **more,
    )
    return getattr(hf, f"{kind}Model")(config), {"input_ids": _ids()}


def _decoder(kind: str, **more: Any) -> Made:
    hf = _hf()
    config = getattr(hf, f"{kind}Config")(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        **more,
    )
    return getattr(hf, f"{kind}ForCausalLM")(config), {"input_ids": _ids(), "use_cache": False}


def _llama_step() -> Made:
    """One decoding step, with caches that are updated in place."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = written.Llama(written.Config(dim=256, layers=2, heads=4, kv_heads=2, ffn=512))

        def forward(self, ids: Tensor, position: Tensor) -> Tensor:
            return self.model(ids, position)  # type: ignore[no-any-return]

    return Step(), {"ids": torch.tensor([[1]]), "position": torch.tensor([5])}


def _gpt2() -> Made:
    config = _hf().GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    return _hf().GPT2LMHeadModel(config), {"input_ids": _ids(), "use_cache": False}


def _t5() -> Made:
    config = _hf().T5Config(
        d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    given = {"input_ids": _ids(positions=16), "decoder_input_ids": _ids(positions=8), "use_cache": False}
    return _hf().T5ForConditionalGeneration(config), given


def _bart() -> Made:
    config = _hf().BartConfig(
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=VOCABULARY,
    )
    return _hf().BartModel(config), {"input_ids": _ids(), "decoder_input_ids": _ids(positions=8), "use_cache": False}


def _whisper() -> Made:
    config = _hf().WhisperConfig(
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_mel_bins=80,
        max_source_positions=100,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    given = {"input_features": torch.randn(1, 80, 200), "decoder_input_ids": _ids(positions=8), "use_cache": False}
    return _hf().WhisperModel(config), given


def _vision(kind: str) -> Made:
    config = getattr(_hf(), f"{kind}Config")(
        hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=384, image_size=64, patch_size=8
    )
    return getattr(_hf(), f"{kind}Model")(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


def _resnet() -> Made:
    config = _hf().ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic", num_labels=10
    )
    return _hf().ResNetForImageClassification(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


def _convnext() -> Made:
    config = _hf().ConvNextConfig(hidden_sizes=[32, 64, 128], depths=[1, 1, 1], num_stages=3)
    return _hf().ConvNextModel(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


def _swin() -> Made:
    config = _hf().SwinConfig(image_size=32, patch_size=2, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4)
    return _hf().SwinModel(config), {"pixel_values": torch.randn(1, 3, 32, 32)}


class _Block(nn.Module):
    def __init__(self, of: int, to: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(of, to, 3, padding=1), nn.Conv2d(to, to, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, of), nn.GroupNorm(8, to)])
        self.time, self.past = nn.Linear(time, to), nn.Conv2d(of, to, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.first(nn.functional.silu(self.norms[0](x)))
        inner = inner + self.time(nn.functional.silu(time))[:, :, None, None]
        return self.past(x) + self.second(nn.functional.silu(self.norms[1](inner)))  # type: ignore[no-any-return]


class _UNet(nn.Module):
    """The UNet of a diffusion model: time-conditioned residual blocks, attention at the bottom and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.down, self.middle = _Block(32, 64, 64), _Block(64, 64, 64)
        self.up = _Block(64 + 32, 32, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale = torch.exp(torch.arange(16) * -0.5)
        angles = time[:, None] * scale
        told = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.first(x)
        low = self.middle(self.down(nn.functional.avg_pool2d(x, 2), told), told)
        flat = low.flatten(2).transpose(1, 2)
        low = (flat + self.attention(flat, flat, flat, need_weights=False)[0]).transpose(1, 2).reshape(low.shape)
        high = nn.functional.interpolate(low, scale_factor=2.0, mode="nearest")
        return self.last(self.up(torch.cat([high, x], 1), told))  # type: ignore[no-any-return]


def _mlp(width: int, layers: int, rows: int) -> Made:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*parts), {"input": torch.randn(rows, width)}


MODELS: dict[str, Callable[[], Made]] = {
    "mlp, one row": lambda: _mlp(512, 4, 1),
    "mlp, 64 rows": lambda: _mlp(512, 4, 64),
    "bert": lambda: _encoder("Bert"),
    "roberta": lambda: _encoder("Roberta"),
    "electra": lambda: _encoder("Electra", embedding_size=128),
    "albert": lambda: _encoder("Albert", embedding_size=64),
    "gpt2": _gpt2,
    "llama": lambda: _decoder("Llama"),
    "llama step": _llama_step,
    "qwen2": lambda: _decoder("Qwen2"),
    "mistral": lambda: _decoder("Mistral"),
    "mixtral": lambda: _decoder("Mixtral", num_local_experts=4),
    "t5": _t5,
    "bart": _bart,
    "whisper": _whisper,
    "vit": lambda: _vision("ViT"),
    "swin": _swin,
    "resnet": _resnet,
    "convnext": _convnext,
    "unet": lambda: (_UNet(), {"x": torch.randn(1, 4, 32, 32), "time": torch.tensor([10.0])}),
}


def make(name: str) -> Made:
    torch.manual_seed(0)
    module, given = MODELS[name]()
    return module.eval(), given
