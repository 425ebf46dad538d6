"""Transformer: the decoder that all families share, written above Ops. Knows no batch policy and no file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters.spec import LINEARS
from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.model.config import ModelConfig
from engine.model.overrides import INPUT_NORM, K_NORM, POST_NORM, Q_NORM, Overrides
from engine.model.rope import inverse_frequencies, rotations
from engine.ops import LoraSlices, Ops, Replay

Q, K, V, O, GATE, UP, DOWN = range(len(LINEARS))  # noqa: E741


@dataclass(frozen=True)
class Linear:
    """A weight as Ops packed it, ‖W[o]‖² of its rows (for DoRA), and its bias where the family has one."""

    packed: Any
    squares_O: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer: q|k|v are one linear, gate|up another."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    plan: Any
    overrides: Overrides | None
    slots_T: Tensor
    cos_TD: Tensor
    sin_TD: Tensor


class Transformer:
    """Token ids in, logits out; keys and values live in a KVCache.

    Legend: T tokens, H hidden size, N query heads, K KV heads, D head size, V vocabulary, R rows of logits.
    """

    def __init__(
        self, config: ModelConfig, ops: Ops, embedding_VH: Tensor, layers: list[Layer], norm_H: Tensor, head: Linear
    ) -> None:
        self.config = config
        self.ops = ops
        self.layers = layers
        self.embedding_VH = embedding_VH
        self._norm_H = norm_H
        self.head = head
        self._replays: WeakKeyDictionary[KVCache, Replay] = WeakKeyDictionary()
        self._scale = config.head_dim**-0.5
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(embedding_VH.device)
        ends = (config.q_size, config.q_size + config.kv_size, config.q_size + 2 * config.kv_size)
        self._qkv_slices: LoraSlices = ((Q, 0, ends[0]), (K, ends[0], ends[1]), (V, ends[1], ends[2]))
        inner = config.intermediate_size
        self._gate_up_slices: LoraSlices = ((GATE, 0, inner), (UP, inner, 2 * inner))
        self._o_slices: LoraSlices = ((O, 0, config.hidden_size),)
        self._down_slices: LoraSlices = ((DOWN, 0, config.hidden_size),)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Computes the batch's tokens and writes their KV. Returns hidden states [T, H], before the final norm."""
        ops = self.ops
        overrides = Overrides(batch, ops, self.config.rms_norm_eps, self.config.vocab_size)
        residual_TH = self._embed(batch.tokens_T, overrides)
        cos_TD, sin_TD = rotations(self._frequencies, batch.positions_T, ops.activation_dtype)
        inputs = (residual_TH, batch.slots_T, cos_TD, sin_TD)
        layers = partial(self._layers, cache, overrides if overrides.in_layers else None)
        if overrides.in_layers:
            x_TH, residual_TH = layers(*inputs, ops.plan(batch))
        else:
            replay = self._replays.get(cache) or self._replays.setdefault(cache, ops.replay())
            x_TH, residual_TH = replay(layers, inputs, ops.plan(batch))
        return residual_TH + x_TH

    def _layers(
        self,
        cache: KVCache,
        overrides: Overrides | None,
        residual_TH: Tensor,
        slots_T: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        plan: Any,
    ) -> tuple[Tensor, Tensor]:
        """All layers. Returns what the last one adds, and the residual stream before it."""
        ops, eps = self.ops, self.config.rms_norm_eps
        step = _Step(plan, overrides, slots_T, cos_TD, sin_TD)
        x_TH = None
        for index, layer in enumerate(self.layers):
            if x_TH is None:
                y_TH = ops.rms_norm(residual_TH, layer.input_norm, eps)
            else:
                y_TH, residual_TH = ops.add_rms_norm(x_TH, residual_TH, layer.input_norm, eps)
            if overrides:
                overrides.norm(y_TH, residual_TH, index, INPUT_NORM)
            x_TH = self._attention(index, y_TH, cache.layers[index], step)
            y_TH, residual_TH = ops.add_rms_norm(x_TH, residual_TH, layer.post_norm, eps)
            if overrides:
                overrides.norm(y_TH, residual_TH, index, POST_NORM)
            x_TH = self._mlp(index, y_TH, step.plan)
        assert x_TH is not None, "a model without layers"
        return x_TH, residual_TH

    @torch.inference_mode()
    def logits(self, hidden_TH: Tensor, batch: ForwardBatch, rows_R: Tensor) -> Tensor:
        """[R, V] fp32 for some rows of `forward`'s result: take only those that are wanted (batch.logit_rows). V is
        larger than the base's where adapters of the batch add tokens, −inf for rows of others."""
        hidden_RH = hidden_TH.index_select(0, rows_R)  # torch's threads turn idly for ms after indexing
        overrides = Overrides(batch, self.ops, self.config.rms_norm_eps, self.config.vocab_size)
        normal_RH = self.ops.rms_norm(hidden_RH, self._norm_H, self.config.rms_norm_eps)
        if overrides:
            overrides.last_norm(normal_RH, hidden_RH, rows_R, self.config.num_layers)
        logits_RV = self.ops.linear(normal_RH, self.head.packed, self.head.bias).float()
        if overrides:
            if overrides.num_added:
                logits_RV = F.pad(logits_RV, (0, overrides.num_added), value=-torch.inf)
            overrides.head(logits_RV, normal_RH, rows_R)
        return logits_RV

    def _embed(self, tokens_T: Tensor, overrides: Overrides) -> Tensor:
        if not overrides:
            return F.embedding(tokens_T, self.embedding_VH).to(self.ops.activation_dtype)
        known_T = tokens_T.clamp(max=self.config.vocab_size - 1) if overrides.num_added else tokens_T
        x_TH = F.embedding(known_T, self.embedding_VH).to(self.ops.activation_dtype)
        overrides.embed(x_TH, tokens_T)
        return x_TH

    def _attention(self, index: int, x_TH: Tensor, cache: Tensor, step: _Step) -> Tensor:
        layer, ops, config = self.layers[index], self.ops, self.config
        qkv = self._linear(index, layer.qkv, x_TH, step.plan, self._qkv_slices)
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        heads_TJD = qkv.view(len(qkv), num_rotated + config.num_kv_heads, config.head_dim)
        qk_TJD, v_TKD = heads_TJD[:, :num_rotated], heads_TJD[:, num_rotated:]
        if layer.q_norm is None or layer.k_norm is None:
            qk_TJD = ops.rope(qk_TJD, step.cos_TD, step.sin_TD)
            q_TND, k_TKD = qk_TJD[:, :num_heads], qk_TJD[:, num_heads:]
        else:
            q_TND = ops.rms_norm(qk_TJD[:, :num_heads], layer.q_norm, config.rms_norm_eps)
            k_TKD = ops.rms_norm(qk_TJD[:, num_heads:], layer.k_norm, config.rms_norm_eps)
            if step.overrides:
                step.overrides.norm(q_TND, qk_TJD[:, :num_heads], index, Q_NORM)
                step.overrides.norm(k_TKD, qk_TJD[:, num_heads:], index, K_NORM)
            q_TND, k_TKD = (ops.rope(each, step.cos_TD, step.sin_TD) for each in (q_TND, k_TKD))
        ops.write_kv(k_TKD, v_TKD, cache, step.slots_T)
        attended = ops.attention(q_TND, cache, step.plan, self._scale, layer.window)
        return self._linear(index, layer.o, attended, step.plan, self._o_slices)

    def _mlp(self, index: int, x_TH: Tensor, plan: Any) -> Tensor:
        layer = self.layers[index]
        gate_up = self._linear(index, layer.gate_up, x_TH, plan, self._gate_up_slices)
        return self._linear(index, layer.down, self.ops.silu_mul(gate_up), plan, self._down_slices)

    def _linear(self, index: int, linear: Linear, x_TH: Tensor, plan: Any, slices: LoraSlices) -> Tensor:
        """The base's linear for all tokens, then each adapter's part for its own."""
        return self.ops.adapted_linear(x_TH, linear.packed, linear.bias, plan, index, slices)
