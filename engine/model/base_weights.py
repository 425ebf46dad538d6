"""ModelBase: what the loading of some adapters (DoRA, trained biases) needs to know of the model's own weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapters.spec import LINEARS
from engine.model.transformer import Linear, Transformer

Array = npt.NDArray[np.float32]


class ModelBase:
    """An adapters.parts.BaseWeights. ‖W + B·A‖² is computed without W + B·A, per output o:

        ‖W[o]‖² + 2 · B[o]·(W·Aᵀ)[o] + B[o]·(A·Aᵀ)·B[o]ᵀ

    with ‖W[o]‖² kept since the weights were read, and W·Aᵀ from the packed linear itself, as the engine multiplies it.
    Reads only; called in the threads that load adapters.
    """

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def bias(self, layer: int, module: str) -> Array | None:
        """[O] of a linear; None where it has none."""
        if module not in LINEARS:
            return None
        linear, columns = self._linear(layer, module)
        return None if linear.bias is None else linear.bias[columns].float().numpy(force=True)

    @torch.inference_mode()
    def squared_norms(self, layer: int, module: str, a_RI: Array, b_OR: Array) -> Array:
        """[O]: ‖W[o] + (B·A)[o]‖²; of embed_tokens, outputs are the hidden units."""
        a, b = torch.from_numpy(np.ascontiguousarray(a_RI)), torch.from_numpy(np.ascontiguousarray(b_OR))
        own_O, cross_OR = self._embedding(a) if module == "embed_tokens" else self._products(layer, module, a)
        gram_RR = a.double() @ a.double().t()
        wide = b.double()
        squares = own_O + 2 * (wide * cross_OR).sum(1) + ((wide @ gram_RR) * wide).sum(1)
        return squares.float().numpy()

    def _products(self, layer: int, module: str, a_RI: Tensor) -> tuple[Tensor, Tensor]:
        """‖W[o]‖² [O] and W·Aᵀ [O, R]."""
        model = self._model
        linear, columns = (model.head, slice(None)) if module == "lm_head" else self._linear(layer, module)
        x_RI = a_RI.to(linear.squares_O.device, model.ops.activation_dtype)
        cross_RO = model.ops.linear(x_RI, linear.packed)[:, columns]
        return linear.squares_O[columns].double().cpu(), cross_RO.t().double().cpu()

    def _embedding(self, a_RV: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the transposed table."""
        table_VH = self._model.embedding_VH
        own_H = torch.linalg.vector_norm(table_VH, dim=0, dtype=torch.float32).square()
        cross_HR = (a_RV.to(table_VH.device, table_VH.dtype) @ table_VH).t()
        return own_H.double().cpu(), cross_HR.double().cpu()

    def _linear(self, layer: int, module: str) -> tuple[Linear, slice]:
        """The packed linear that holds this one, and its columns there."""
        weights, config = self._model.layers[layer], self._model.config
        groups = (
            (weights.qkv, ("q_proj", "k_proj", "v_proj")),
            (weights.o, ("o_proj",)),
            (weights.gate_up, ("gate_proj", "up_proj")),
            (weights.down, ("down_proj",)),
        )
        for linear, names in groups:
            first = 0
            for name in names:
                end = first + config.linears[name][0]
                if name == module:
                    return linear, slice(first, end)
                first = end
        raise KeyError(module)
