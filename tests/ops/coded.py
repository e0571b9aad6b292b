"""A test backend: its quantised activations are codes with one scale per 128 codes; all other bodies are the reference."""

from dataclasses import dataclass
from unittest import mock

import torch

from deepinfer.ops import attention, engram, moe, norm, quant
from deepinfer.ops.arithmetic import rms_norm

BLOCK = 128


@dataclass(frozen=True)
class CodedRows:
    """Quantised activations without the interface of a tensor, so that code which reads them as a tensor fails.

    Attributes:
        codes: [num_rows, blocks, 128] E4M3, the last block padded with zeros.
        scale: [num_rows, blocks, 1] fp64.
        width: elements of a row.
        dtype: dtype of activations.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x):
        """Quantise unrounded rows [num_rows, width]."""
        codes, scale = quant._mxfp8(torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)), BLOCK)
        return cls(codes, scale.double(), x.shape[1], x.dtype)

    def rows(self, index):
        return CodedRows(self.codes[index], self.scale[index], self.width, self.dtype)

    def values(self):
        return (self.codes.double() * self.scale).flatten(1)[:, : self.width].to(self.dtype)


def _norm8(x, weight, eps):
    return CodedRows.of(rms_norm(x, weight, eps))


def _mhc_finish(*arguments):
    mix, x, _ = norm.mhc_finish.reference(*arguments)
    return mix, x, CodedRows.of(x)


def _qkv_norm(qkv, q_weight, kv_weight, rotation, eps):
    _, records = norm.qkv_norm.reference(qkv, q_weight, kv_weight, rotation, eps)
    return _norm8(qkv[:, : len(q_weight)], q_weight, eps), records


def _engram_gather(*arguments):
    return CodedRows.of(engram.engram_gather.reference(*arguments).values())


def _taking(operator):
    """The reference with the values of its first argument; intermediate values are quantised as in this backend."""

    def body(x8, *others):
        assert isinstance(x8, CodedRows), "this backend's layout"
        with mock.patch.object(moe, "round_mxfp8", lambda x: CodedRows.of(x).values()):
            return operator.reference(quant.RoundedRows(x8.values()), *others)

    return body


def keyword(operator, body):
    """A body that also takes arguments by name."""
    names = operator.reference.__code__.co_varnames[: operator.reference.__code__.co_argcount]

    def bound(*given, **named):
        return body(*given, *(named[name] for name in names[len(given) :]))

    return bound


CODED = {
    operator: keyword(operator, body)
    for operator, body in {
        quant.quantise: CodedRows.of,
        norm.norm8: _norm8,
        norm.mhc_finish: _mhc_finish,
        norm.qkv_norm: _qkv_norm,
        engram.engram_gather: _engram_gather,
        **{each: _taking(each) for each in (quant.linear_fp8, attention.index_query, moe.experts, moe.shared_expert)},
    }.items()
}
"""Operator -> body, for the test backend."""
