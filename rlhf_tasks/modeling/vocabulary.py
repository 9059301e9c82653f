"""Log-probs, entropies and losses of tokens from a linear head, without all of its logits at once.

With a vocabulary of 50,000 the logits are by far the largest tensor of a pass. Here they exist for some
tokens at a time, and are computed one slice of the vocabulary after the other. Where a loss is to be learned
from, each group of tokens is read, its loss is computed, and its gradients are added up before the next
group. So no logits are computed twice or kept for a backward pass.

N tokens · V vocabulary · H hidden · S slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_tasks.modeling.onednn import add_product, product
from rlhf_tasks.modeling.products import RoundedLinear, float32_rows, rounded_rows

CPU_LOGITS, GPU_LOGITS = 2**22, 2**26
"""Logits of a group of tokens: the gradients of all V weights are added to once for each group."""
CPU_SLICE, GPU_SLICE = 2**18, 2**26
"""Logits that are computed at once: on a CPU few enough for its cache, on a GPU enough to keep it busy."""
NARROWEST = 256  # columns of a slice
SMALLEST_SHARE = 1e-30  # of a slice in a token's distribution; the inverse of a smaller one is not a float32

Loss = Callable[[Tensor, Tensor, slice], Tensor]
"""The loss of some tokens, a scalar: of their log-probs and entropies, (n,) each, and which of all they are.

A loss is the sum over such groups. It is called for each group in order, and must give the same when that is
repeated.
"""


class Stats(NamedTuple):
    """(N,) each, in float32 or float64, without gradient."""

    logprobs: Tensor
    entropy: Tensor
    likeliest: Tensor  # 1 where no other token is likelier, else 0


def stats_of_logits(logits: Tensor, labels: Tensor) -> Stats:
    """Log-prob of the label, entropy, and 1 if no token is likelier: (N, V) logits, (N,) → (N,) each.

    Unlike those of `label_stats`, the first two have a gradient.
    """
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(1, labels[:, None]).squeeze(1)
    entropy = logits.logsumexp(-1) - (log_p.exp() * logits).sum(-1)
    return Stats(logprobs, entropy, (logprobs >= log_p.amax(-1)).to(log_p.dtype))


def label_stats(head: nn.Linear, hidden: Tensor, labels: Tensor, temperature: float = 1.0) -> Stats:
    """The statistics of a linear head's logits over the temperature: (N, H) states, (N,) labels."""
    factors = _Factors.of(head, hidden.detach(), temperature)
    with torch.autocast(hidden.device.type, enabled=False):  # the factors have their formats already
        groups = [factors.read(tokens, labels[tokens]).stats for tokens in factors.groups()]
    return _joined(groups, hidden)


def label_loss(
    head: nn.Linear, hidden: Tensor, labels: Tensor, loss: Loss, temperature: float = 1.0
) -> tuple[Tensor, Stats]:
    """The loss of all tokens, with gradients for the states and the head's weights; and `label_stats`."""
    found = list[Stats]()
    needs = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, head.weight, head.bias)
    )
    apply: Callable[..., Tensor] = _LabelLoss.apply
    total = apply(hidden, head.weight, head.bias, head, labels, loss, temperature, needs, found)
    return total, _joined(found, hidden)


def _joined(groups: list[Stats], hidden: Tensor) -> Stats:
    if not groups:
        return Stats(*(hidden.new_zeros(0, dtype=_exact(hidden.dtype)) for _ in Stats._fields))
    return Stats(*(torch.cat(parts) for parts in zip(*groups, strict=True)))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Slices:
    """What a group of n tokens found in the slices of the vocabulary, from left to right.

    p, the probability of a token v of slice s, is `exps[s][:, v] · shares[s]`.
    """

    stats: Stats
    exps: list[Tensor]  # (n, width) each: e^(z − top), z the logits; none if they are not to be kept
    shares: Tensor  # (S, n): e^(top − log Σ e^z)
    heights: Tensor  # (S, n): top − Σ p · z


@dataclass(frozen=True)
class _Factors:
    """The two factors of the head's product, in the number format that it has in a pass."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float
    is_rounded: bool
    """Whether the factors are in bfloat16 on a CPU. Their product is then computed in float32: in bfloat16 it
    rounds the logits too, by more than an update moves a log-prob."""

    @classmethod
    def of(cls, head: nn.Linear, hidden: Tensor, temperature: float) -> _Factors:
        weight, kind = head.weight.detach(), hidden.device.type
        bias: Tensor | None = None if head.bias is None else head.bias.detach()
        dtype = weight.dtype
        if isinstance(head, RoundedLinear):
            dtype = torch.bfloat16
        elif torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        is_rounded = kind == "cpu" and dtype == torch.bfloat16
        if is_rounded:
            hidden, bias = hidden.float(), None if bias is None else bias.float()
        return cls(hidden, weight, bias, temperature, is_rounded)

    @property
    def is_exact(self) -> bool:
        """Whether the states have at least the precision of the logits."""
        return self.hidden.dtype == _exact(self.hidden.dtype)

    def groups(self) -> Iterator[slice]:
        """The tokens, cut into groups of nearly the same number."""
        count, is_cpu = len(self.hidden), self.hidden.device.type == "cpu"
        most = max(1, (CPU_LOGITS if is_cpu else GPU_LOGITS) // len(self.weight))
        num_groups = -(-count // most)
        for i in range(num_groups):
            yield slice(i * count // num_groups, (i + 1) * count // num_groups)

    def slices(self, num_tokens: int) -> Iterator[slice]:
        is_cpu = self.hidden.device.type == "cpu"
        width = max(NARROWEST, (CPU_SLICE if is_cpu else GPU_SLICE) // num_tokens)
        for start in range(0, len(self.weight), width):
            yield slice(start, min(start + width, len(self.weight)))

    def read(self, tokens: slice, labels: Tensor, *, keep: bool = False) -> _Slices:
        """The statistics of one group of tokens, and what `_Gradients` needs if that is to be kept."""
        hidden = self.hidden[tokens]
        if self.is_exact:  # spares a division of each logit
            hidden = hidden / self.temperature
        chosen = torch.zeros(labels.shape, dtype=_exact(hidden.dtype), device=hidden.device)
        exps, tops, totals, moments = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        for columns in self.slices(len(hidden)):
            z = self._logits(hidden, columns)
            local, inside = _within(labels, columns)
            chosen = torch.where(inside, z.gather(1, local).squeeze(1), chosen)
            tops.append(z.amax(1))
            z.sub_(tops[-1][:, None])
            exp = z.exp()
            totals.append(exp.sum(1))
            moments.append(z.mul_(exp).sum(1))  # Σ e^(z − top) · (z − top)
            if keep:
                exps.append(exp)
        heights, sums, moment = torch.stack(tops), torch.stack(totals), torch.stack(moments)
        top = heights.amax(0)
        heights -= top
        shares = heights.exp()
        total = (sums * shares).sum(0)
        mean = ((moment + heights * sums) * shares).sum(0) / total  # Σ p · z − top
        log_total = total.log()
        stats = Stats(chosen - top - log_total, log_total - mean, (chosen >= top).to(total.dtype))
        return _Slices(stats, exps, shares / total, heights - mean)

    def _logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """(n, width) logits over the temperature, in float32 or float64; exact states are over it already."""
        weight = self.weight[columns].float() if self.is_rounded else self.weight[columns]
        bias = None if self.bias is None else self.bias[columns]
        if self.is_exact:
            return product(hidden, weight, None if bias is None else bias / self.temperature)
        z = product(hidden, weight, bias)
        return z.to(_exact(z.dtype)).div_(self.temperature)


def _within(labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(n, 1) each label's column in this slice, or any other column; (n,) whether the label lies in it."""
    local = labels - columns.start
    width = columns.stop - columns.start
    return local.clamp(0, width - 1)[:, None], (local >= 0) & (local < width)


class _Gradients:
    """Sums of the gradients of groups of tokens."""

    def __init__(self, factors: _Factors, needs: tuple[bool, ...]) -> None:
        self._factors = factors
        like = (factors.hidden, factors.weight, factors.bias)
        self.hidden, self.weight, self.bias = (
            torch.zeros(x.shape, dtype=_exact(x.dtype), device=x.device) if x is not None and needed else None
            for x, needed in zip(like, needs, strict=True)
        )

    def add(self, tokens: slice, labels: Tensor, found: _Slices, g: Tensor, g_entropy: Tensor | None) -> None:
        """Add what follows from ∂loss / ∂log-prob and ∂loss / ∂entropy, (n,) each.

        With z the logits: ∂ log p(label) / ∂z = [label] − p, and ∂ entropy / ∂z = −p · (z − Σ p · z).
        """
        factors, logprobs = self._factors, found.stats.logprobs
        of_label = -torch.expm1(logprobs)  # 1 − p, from the log-prob that no product in bfloat16 has rounded
        scale = g
        if g_entropy is not None:
            of_label = of_label * g - logprobs.exp() * (logprobs + found.stats.entropy) * g_entropy
            scale = torch.ones_like(g)
        hidden = factors.hidden[tokens]
        for columns, d_z, share, height in zip(
            factors.slices(len(hidden)), found.exps, found.shares, found.heights, strict=True
        ):  # ∂loss / ∂z is d_z times a factor of each token, which spares passes over the slice
            if g_entropy is not None:
                log = torch.xlogy(d_z, d_z).mul_(g_entropy[:, None])  # e^x · x, and 0 where e^x is
                d_z.mul_((g + g_entropy * height)[:, None]).add_(log)
            share = share.clamp_min(SMALLEST_SHARE)
            local, inside = _within(labels, columns)
            at_label = torch.where(inside[:, None], -(of_label / share)[:, None], d_z.gather(1, local))
            d_z.scatter_(1, local, at_label)
            self._add(columns, tokens, d_z, (share * scale / -factors.temperature)[:, None])

    def _add(self, columns: slice, tokens: slice, d_z: Tensor, row: Tensor) -> None:
        """Add the products of d_z · row, (n, width) · (n, 1), with the weights and with the states."""
        weight, hidden = self._factors.weight[columns], self._factors.hidden[tokens]
        if self._factors.is_rounded:
            rounded = rounded_rows(d_z)
            if self.hidden is not None:
                self.hidden[tokens].addcmul_(float32_rows(rounded @ weight, hidden.shape), row)
            if self.weight is not None:
                self.weight[columns] += (rounded.t() @ rounded_rows(hidden * row)).float()
        else:
            if self.hidden is not None:
                self.hidden[tokens].addcmul_(product(d_z.to(weight.dtype), weight.t()).to(row.dtype), row)
            if self.weight is not None and hidden.dtype == self.weight.dtype:
                add_product(self.weight[columns], d_z.t(), (hidden * row).t())
            elif self.weight is not None:
                self.weight[columns] += d_z.to(hidden.dtype).t() @ (hidden * row).to(hidden.dtype)
        if self.bias is not None:
            self.bias[columns] += d_z.t() @ row[:, 0]


class _LabelLoss(torch.autograd.Function):
    """A loss whose gradients are computed in the forward pass, group after group."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: nn.Linear,
        labels: Tensor,
        loss: Loss,
        temperature: float,
        needs: bool,
        found: list[Stats],
    ) -> Tensor:
        factors = _Factors.of(head, hidden, temperature)
        total = torch.zeros((), dtype=_exact(hidden.dtype), device=hidden.device)
        gradients = _Gradients(factors, ctx.needs_input_grad[:3]) if needs else None
        with torch.autocast(hidden.device.type, enabled=False):
            for tokens in factors.groups():
                own = labels[tokens]
                read = factors.read(tokens, own, keep=needs)
                found.append(read.stats)
                value, of_logprobs, of_entropy = _loss_with_gradients(loss, read.stats, tokens, needs)
                total += value
                if gradients is not None:
                    gradients.add(tokens, own, read, of_logprobs, of_entropy)
                del read  # before the next group is read
        # not the factors: until the backward pass, they would keep weights that a layout has given back
        ctx.sums = None if gradients is None else (gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """The gradients are multiplied in place, so there is no second call."""
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("this loss has had its backward pass; compute it anew")
        own = [None if x is None else x.mul_(g).to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True)]
        return *own, *[None] * 6


def _loss_with_gradients(
    loss: Loss, stats: Stats, tokens: slice, needs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a group, ∂loss / ∂log-prob, and ∂loss / ∂entropy where the loss depends on it."""
    logprobs, entropy = stats.logprobs, stats.entropy
    if not needs:
        return loss(logprobs, entropy, tokens).detach(), torch.zeros_like(logprobs), None
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (logprobs, entropy)]
        value = loss(inputs[0], inputs[1], tokens)
        if not value.requires_grad:
            return value, torch.zeros_like(logprobs), None
        of_logprobs, of_entropy = torch.autograd.grad(value, inputs, allow_unused=True)
    return value.detach(), torch.zeros_like(logprobs) if of_logprobs is None else of_logprobs, of_entropy
