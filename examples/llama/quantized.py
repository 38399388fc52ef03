"""Quantisation of a model's linear layers in plain PyTorch.

int8 and float8 have a scale per channel, int4 has a scale and a zero per group of a channel's depth. Those are
weight-only; "float8-dynamic" also rounds the activations to float8, with a scale per row.

    from llama.quantized import quantize
    model = torch.compile(quantize(model, "int4"), backend="ark")

It is written like GPT-fast's and torchao's code. torch.compile(backend="ark") finds the decoding in the graph and does
it in registers while the product reads the codes (docs/compile.md). `quantize_by_torchao` gives the same layers the
weights of torchao, where that package is installed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 128
FORMS = ("int8", "float8", "int4")
TORCHAO = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}


class Int8Linear(nn.Module):
    """The product of the codes, times the channels' scales."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scales = weight.float().abs().amax(1).clamp_min(1e-8) / 127
        self.register_buffer("codes", (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scales", scales.to(weight.dtype))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.codes.to(x.dtype)) * self.scales
        return product if self.bias is None else product + self.bias


class Float8Linear(nn.Module):
    """The product of weights that are decoded in float32 and rounded to the activations' type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scales = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 448
        self.register_buffer("codes", (weight.float() / scales).to(torch.float8_e4m3fn))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.codes.float() * self.scales).to(x.dtype), self.bias)


class Float8DynamicLinear(nn.Module):
    """torch._scaled_mm of float8 rows, as torchao's Float8DynamicActivationFloat8WeightConfig makes it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scales = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 448
        self.register_buffer("codes", (weight.float() / scales).to(torch.float8_e4m3fn))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scales = rows.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 448
        codes = (rows.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        product = torch._scaled_mm(codes, self.codes.t(), scales, self.scales.t(), self.bias, out_dtype=x.dtype)
        return product.view(*x.shape[:-1], -1)


class Int4Linear(nn.Module):
    """Two codes per byte, the first in the low bits, with a scale and a zero per group."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: int = GROUP) -> None:
        super().__init__()
        groups = weight.float().view(weight.shape[0], -1, group)
        least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scales = ((most - least).clamp_min(1e-8) / 15).to(weight.dtype)
        zeros = (-least / scales.float()).round().clamp(0, 15)
        codes = (groups / scales.float() + zeros).round().clamp(0, 15).to(torch.uint8).view(weight.shape)
        self.register_buffer("codes", codes[:, ::2] | codes[:, 1::2] << 4)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros.to(weight.dtype))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).view(*self.scales.shape[:2], -1)
        weight = (codes.to(x.dtype) - self.zeros) * self.scales
        return F.linear(x, weight.view(weight.shape[0], -1), self.bias)


def quantize(model: nn.Module, form: str) -> nn.Module:
    """Replaces every nn.Linear in place. Returns the model itself."""
    make = {
        "int8": Int8Linear,
        "float8": Float8Linear,
        "float8-dynamic": Float8DynamicLinear,
        "int4": Int4Linear,
    }[form]
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, make(child.weight.detach(), None if child.bias is None else child.bias.detach()))
        else:
            quantize(child, form)
    return model


def quantize_by_torchao(model: nn.Module, form: str) -> nn.Module:
    """Replaces the weight of every nn.Linear by torchao's tensor subclass, in place. Returns the model itself.

    `form` is a key of TORCHAO. torchao also changes Inductor's settings, for the whole process. Raises ImportError
    where torchao, or a package that it needs, is missing.
    """
    try:
        import torchao.quantization as torchao
    except ImportError as error:
        raise ImportError("the package torchao is missing: pip install torchao") from error
    options = {}
    if form == "int4" and next(model.parameters()).is_cuda:
        # The order of PyTorch's own kernel (bfloat16 only). The default order needs the kernels of the package mslk.
        options["int4_packing_format"] = "tile_packed_to_4d"
    try:
        torchao.quantize_(model, getattr(torchao, TORCHAO[form])(**options), lambda one, _: isinstance(one, nn.Linear))
    except ImportError as error:
        raise ImportError(
            f"torchao's {TORCHAO[form]} cannot run here ({error}; mslk is a package of kernels for CUDA GPUs)"
        ) from error
    return model
