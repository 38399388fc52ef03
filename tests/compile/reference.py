"""A double of `_C.plan` that runs a lowered graph with PyTorch's own operators, independent of the C++ side.

It follows csrc/compiler/graph/graph.hpp literally: values are strided views, floating types compute in float32 and
integers in int64, and results are rounded to the output's type. It is stricter than C++: temporaries are poisoned, a
value is written at most once and not read before, only mutated inputs are written, and extents are checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import reference_indexed as indexed
import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

UNARY = (
    "neg abs exp log log1p expm1 sqrt rsqrt reciprocal sin cos tanh erf sigmoid relu floor ceil round trunc sign "
    "exp2 log2 log10 erfc tan asin acos atan sinh cosh asinh acosh atanh logical_not bitwise_not isnan isinf"
)
BINARY = (
    "add sub mul div floor_divide remainder fmod atan2 pow maximum minimum eq ne lt le gt ge "
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
)
OPERANDS = (
    {name: 1 for name in UNARY.split()} | {name: 2 for name in BINARY.split()} | {"where": 3, "copy": 1, "cast": 1}
)
OPERANDS["round_e4m3"] = 1
POINTWISE: dict[str, Any] = {
    name: (lambda x: x) if name in ("copy", "cast") else getattr(torch, name)
    for name in OPERANDS
    if name != "round_e4m3"
}
POINTWISE["round_e4m3"] = lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)


class Graph:
    """Records the front end's graph, with strict checks."""

    def __init__(self) -> None:
        self.buffers: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.arguments: list[int] = []
        self.results: list[int] = []

    def buffer(self, kind: str, argument: int, bytes: int, mutated: bool = False, parameter: bool = False) -> int:
        assert kind in ("input", "output", "temporary"), kind
        same = [b for b in self.buffers if b["kind"] == kind]
        others = {b["argument"] for b in same}
        assert argument == -1 if kind == "temporary" else argument >= 0 and argument not in others, (kind, argument)
        assert bytes > 0 and (not mutated or kind == "input") and not (mutated and parameter)
        self.buffers.append(dict(kind=kind, argument=argument, bytes=bytes, mutated=mutated, parameter=parameter))
        return len(self.buffers) - 1

    def value(self, buffer: int, dtype: str, shape: list[int], strides: list[int], offset: int = 0) -> int:
        size = DTYPES[dtype].itemsize
        assert len(shape) == len(strides) and all(n > 0 for n in shape) and all(s >= 0 for s in strides)
        end = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        assert offset >= 0 and end * size <= self.buffers[buffer]["bytes"], (shape, strides, offset)
        self.values.append(dict(buffer=buffer, dtype=DTYPES[dtype], shape=shape, strides=strides, offset=offset))
        return len(self.values) - 1

    def literal(self, value: float | int | bool, dtype: str) -> int:
        wanted = {"bool": bool, "int64": int, "int32": int}.get(dtype, float)
        assert type(value) is wanted, (value, dtype)
        self.values.append(dict(buffer=-1, dtype=DTYPES[dtype], literal=value, shape=[]))
        return len(self.values) - 1

    def node(self, op: str, inputs: list[int], outputs: list[int], attributes: dict[str, Any], origin: str) -> int:
        assert all(0 <= v < len(self.values) for v in (*inputs, *outputs)) and isinstance(origin, str)
        assert len(outputs) == 1
        if op in POINTWISE:
            assert len(inputs) == OPERANDS[op], (op, inputs)
        self.nodes.append(dict(op=op, inputs=inputs, outputs=outputs, attributes=attributes, origin=origin))
        return len(self.nodes) - 1

    def argument(self, value: int) -> None:
        buffer = self.buffers[self.values[value]["buffer"]]
        assert buffer["kind"] == "input" and buffer["argument"] == len(self.arguments)
        self.arguments.append(value)

    def output(self, value: int) -> None:
        buffer = self.buffers[self.values[value]["buffer"]]
        assert buffer["kind"] == "output" and buffer["argument"] == len(self.results)
        self.results.append(value)

    def ops(self) -> list[str]:
        return [node["op"] for node in self.nodes]


class Region:
    """Runs the recorded graph."""

    estimated_us = 0.0
    from_cache = False
    costs = "none"
    made: list[Region] = []  # noqa: RUF012 - tests look at what was compiled

    def __init__(self, graph: Graph, name: str, options: dict[str, Any]) -> None:
        assert set(options) <= {
            "threads",
            "groups",
            "otherwise",
            "multi_step",
            "dump_passes",
            "measured_costs",
            "costs",
            "costs_from",
            "device",
            "cache",
            "caches",
        }
        assert options["threads"] > 0 and not options.get("multi_step")
        self.graph, self.name, self.calls = graph, name, 0
        self._check()
        Region.made.append(self)

    def json(self) -> str:
        return json.dumps(
            {"nodes": self.graph.ops(), "target": {"name": "double", "cache": "auto"}, "stages": [], "values": []}
        )

    def source(self) -> str:
        return ""

    def _check(self) -> None:
        written: set[int] = set()
        for node in self.graph.nodes:
            for value in node["inputs"]:
                buffer = self.graph.values[value]["buffer"]
                if buffer >= 0 and self.graph.buffers[buffer]["kind"] != "input":
                    assert any(self.graph.values[w]["buffer"] == buffer for w in written), "read before written"
            for value in node["outputs"]:
                buffer = self.graph.buffers[self.graph.values[value]["buffer"]]
                assert value not in written, "a value is written twice"
                assert buffer["kind"] != "input" or buffer["mutated"], "an input is written that is not mutated"
                written.add(value)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        graph = self.graph
        assert len(inputs) == len(graph.arguments) == sum(b["kind"] == "input" for b in graph.buffers)
        for tensor, value in zip(inputs, graph.arguments, strict=True):
            v = graph.values[value]
            assert tensor.dtype == v["dtype"] and list(tensor.shape) == v["shape"], (tensor.shape, v)
        memory: list[Any] = []
        for b in graph.buffers:
            memory.append(inputs[b["argument"]] if b["kind"] == "input" else {})

        def view(number: int) -> torch.Tensor:
            v = graph.values[number]
            if v["buffer"] < 0:
                return torch.tensor(v["literal"], dtype=v["dtype"])
            base = memory[v["buffer"]]
            if isinstance(base, dict):  # created when its type is known
                if not base:
                    size = graph.buffers[v["buffer"]]["bytes"] // v["dtype"].itemsize
                    base["flat"] = torch.full((size,), _poison(v["dtype"]), dtype=v["dtype"])
                base = base["flat"]
            assert base.dtype == v["dtype"], (base.dtype, v)
            return torch.as_strided(base, v["shape"], v["strides"], base.storage_offset() + v["offset"])

        for node in graph.nodes:
            out = view(node["outputs"][0])
            result = compute(node["op"], [view(v) for v in node["inputs"]], node["attributes"], out)
            if result is not None:
                assert tuple(torch.broadcast_shapes(result.shape, out.shape)) == tuple(out.shape), node
                out.copy_(result.expand(out.shape).clone())
        return [view(v) for v in graph.results]


def _poison(dtype: torch.dtype) -> Any:
    return math.nan if dtype.is_floating_point else True if dtype == torch.bool else -(2**31) + 12345


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype.is_floating_point else x.long() if x.dtype != torch.bool else x


def compute(op: str, inputs: list[torch.Tensor], attributes: dict[str, Any], out: torch.Tensor) -> torch.Tensor | None:
    if op == "iota":
        n = out.shape[0]
        return attributes["start"] + attributes["step"] * torch.arange(n, dtype=torch.int64)
    if op == "scatter":
        base, index, source = inputs
        assert index.min() >= (-base.shape[attributes["dim"]] if attributes["wrap"] else 0)
        assert index.max() < base.shape[attributes["dim"]]
        assert base.data_ptr() == out.data_ptr() and source.dtype == base.dtype
        accumulate = attributes.get("accumulate", False)
        if attributes.get("along"):
            assert index.shape == source.shape
            add = out.scatter_add_ if accumulate else out.scatter_
            add(attributes["dim"], index.long(), source.clone())
            return None
        assert index.dim() == 1
        if accumulate:
            out.index_add_(attributes["dim"], index.long(), source.clone())
            return None
        out[(slice(None),) * attributes["dim"] + (index.long(),)] = source.clone()
        return None
    if op == "gather":
        table, *indices = inputs
        dim = attributes["dim"]
        for index, length in zip(indices, table.shape[dim:], strict=False):
            assert index.min() >= (-length if attributes["wrap"] else 0)
            assert index.max() < length and index.shape == indices[0].shape
        if attributes.get("along"):
            return table.gather(dim, indices[0].long())
        return table[(slice(None),) * dim + tuple(index.long() for index in indices)]
    if op in indexed.OPERATORS:
        return indexed.OPERATORS[op](inputs, attributes, out)
    if op == "matmul":
        product = torch.matmul(wide(inputs[0]), wide(inputs[1]))
        assert inputs[0].shape[:-2] == inputs[1].shape[:-2]
        return product if len(inputs) == 2 else product + wide(inputs[2])
    if op == "dequant_matmul":
        return dequant_matmul(inputs, attributes)
    if op == "scaled_matmul":
        rows, codes, row_scale, column_scale, *bias = inputs
        assert rows.dtype == codes.dtype == torch.float8_e4m3fn and rows.shape[0] > 16
        product = rows.float() @ codes.float() * column_scale.float() * row_scale.float()
        return product + bias[0].float() if bias else product
    if op == "attention":
        return attention(*(wide(x) for x in inputs[:3]), inputs[3] if len(inputs) > 3 else None, attributes)
    if op in ("sum", "mean", "amax", "amin", "any", "argmax"):
        x, dims, keepdim = wide(inputs[0]), attributes["dims"], attributes["keepdim"]
        assert dims and all(0 <= d < x.dim() for d in dims)
        if op == "argmax":
            assert len(dims) == 1
            return torch.argmax(x, dims[0], keepdim=keepdim)
        return getattr(torch, op)(x, dims, keepdim=keepdim)
    function = POINTWISE[op]
    values = [wide(x) for x in inputs]
    kinds = {"float" if v.is_floating_point() else "bool" if v.dtype == torch.bool else "int" for v in values}
    if op == "where":
        assert values[0].dtype == torch.bool
        kinds = {"float" if v.is_floating_point() else str(v.dtype) for v in values[1:]}
    if op == "copy":
        assert inputs[0].dtype == out.dtype
    elif op != "cast":
        assert len(kinds) == 1, f"{op} of mixed kinds {kinds}"
        boolean = "bool" in kinds
        assert not boolean or op.startswith("logical") or op in ("where",), f"{op} of booleans"
    result = function(*values)
    if op not in ("cast",):
        assert result.is_floating_point() == out.is_floating_point(), f"{op} writes another kind"
    return result


def dequant_matmul(inputs: list[torch.Tensor], attributes: dict[str, Any]) -> torch.Tensor:
    rows, codes, *others = inputs
    if attributes["block"]:
        halves = torch.cat((codes & 15, codes >> 4), 2)  # [blocks, depth, columns of a block]
        numbers = halves.permute(1, 0, 2).flatten(1)
    elif attributes["bits"] == 4:
        assert codes.dtype in (torch.int8, torch.uint8)
        codes = codes.view(torch.uint8)
        halves = [(codes & 15).int(), (codes >> 4).int()]
        numbers = torch.stack(halves[::-1] if attributes["high_first"] else halves, 1).flatten(0, 1)
        if attributes["signed"]:
            numbers = (numbers ^ 8) - 8
    else:
        assert codes.dtype in (torch.int8, torch.float8_e4m3fn)
        numbers = codes
    weight = numbers.float() - attributes["offset"]
    assert weight.shape[0] == rows.shape[1]
    scale = others.pop(0).float() if attributes["scaled"] else torch.ones(1, weight.shape[1])
    zero = others.pop(0).float() if attributes["zero"] else torch.zeros_like(scale)
    scale, zero = (x.repeat_interleave(weight.shape[0] // x.shape[0], 0) for x in (scale, zero))
    weight = weight * scale + zero if attributes["zero"] == "after" else (weight - zero) * scale
    product = rows.float() @ weight
    if attributes["biased"]:
        product = product + others.pop(0).float()
    assert not others
    return product


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, attributes: dict[str, Any]
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * attributes["scale"]
    if attributes["causal"]:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    return torch.matmul(weights / weights.sum(-1, keepdim=True).clamp_min(1e-30), v)
