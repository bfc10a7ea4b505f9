"""`nn.MultiheadAttention` with fewer heads than its width would make, or fewer inputs: torch's forward takes neither.

The parameters have the names and the layout that they had, so that a state dict fits; only rows and columns are gone.
As in torch's own, no call can be seen that names a size (`asked_sizes.py`): those of modules around it are numbered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.structure.narrowed import sizes_of

_taken_apart = torch.ops.aten.unflatten.int


class NarrowAttention(nn.MultiheadAttention):
    """Multi-head attention in which `num_heads` heads of `head_dim` are left of a wider layer."""

    fused: bool

    def _reset_parameters(self) -> None:
        """As torch's own, which looks at `_qkv_same_embed_dim`; Hugging Face initialises models that it loads."""
        weights = (self.in_proj_weight,) if self.fused else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        to_itself = query is key and key is value
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        if to_itself and self.fused:  # one product instead of three
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            projected = self._project(query, key, value)
        q, k, v = (self._heads(t) for t in projected)
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        weights = None
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            y = F.dropout(weights, dropout, self.training) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.fused:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _heads(self, x: Tensor) -> Tensor:
        return _taken_apart(x, -1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as one that is added; torch's hold for each head of each example, one after the other."""
        whole = None
        for given in (mask, None if padding is None else padding[:, None, None]):
            if given is None:
                continue
            if given.dim() == 3:
                given = _taken_apart(given, 0, (len(q), -1))
            if given.dtype == torch.bool:
                given = torch.zeros_like(given, dtype=q.dtype).masked_fill(given, -torch.inf)
            whole = given if whole is None else whole + given
        return whole


def opened(module: nn.Module) -> bool:
    """Whether a module is torch's attention, with nothing that `NarrowAttention` doesn't have."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward in (nn.MultiheadAttention.forward, NarrowAttention.forward)
        and module.bias_k is None
        and not module.add_zero_attn
    )


def narrow(module: nn.MultiheadAttention, heads: int) -> None:
    """Makes torch's attention one that has so many heads, or reads fewer channels than it gives."""
    if not isinstance(module, NarrowAttention):
        module.fused = module._qkv_same_embed_dim
        module._qkv_same_embed_dim = False  # keeps torch's encoder layers from their fast path, where heads are whole
        module.__class__ = NarrowAttention
    module.num_heads = sizes_of(module)["num_heads"] = heads
