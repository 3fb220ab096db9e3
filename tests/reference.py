"""Naive twins of visgen's fast paths, written from the papers and specs without importing visgen. Slow on purpose."""

from __future__ import annotations

import cmath
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------- layers


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x [..., D]: float32 statistics, then the weight (LlamaGen 2.2)."""
    wide = x.double()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def swiglu_hidden(width: int, multiple_of: int) -> int:
    """floor(2/3 * 4 D), rounded up (LlamaGen 2.1)."""
    hidden = (8 * width) // 3
    while hidden % multiple_of:
        hidden += 1
    return hidden


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = x @ w1.T
    return ((gate / (1 + torch.exp(-gate))) * (x @ w3.T)) @ w2.T


def rope_2d(vector: Sequence[float], row: int, column: int, base: float = 10000.0) -> list[float]:
    """One head's vector of d numbers at grid cell (row, column), pair (2i, 2i+1) as one complex number (LlamaGen 2.4).

    A negative cell is a prefix slot: the zero vector.
    """
    if row < 0:
        return [0.0] * len(vector)
    half = len(vector) // 2
    per_axis = half // 2
    out: list[float] = []
    for i in range(half):
        at = row if i < per_axis else column
        angle = at * base ** (-2 * (i % per_axis) / half)
        turned = complex(vector[2 * i], vector[2 * i + 1]) * cmath.exp(1j * angle)
        out += [turned.real, turned.imag]
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [B, H, W, d], k and v [B, Hkv, S, d], visible [B, W, S] bool -> [B, H, W, d]; one softmax at a time."""
    rows, heads, window, width = q.shape
    group = heads // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(rows):
        for h in range(heads):
            for w in range(window):
                keys = [s for s in range(k.shape[2]) if visible[b, w, s]]
                scores = [float(q[b, h, w] @ k[b, h // group, s]) / math.sqrt(width) for s in keys]
                weights = [math.exp(x - max(scores)) for x in scores]
                for s, weight in zip(keys, weights, strict=True):
                    out[b, h, w] += weight / sum(weights) * v[b, h // group, s]
    return out


# --------------------------------------------------------------------------------------------- the transformer


def ar_logits(
    state: Mapping[str, Tensor],
    prefix: Tensor,  # [B, P, D]
    tokens: Tensor,  # [B, n], n >= 0
    grid: tuple[int, int],
    heads: int,
    kv_heads: int,
    present: Tensor | None = None,  # [B, P] bool
) -> Tensor:
    """Logits [B, n + 1, V] of tokens 0..n by one full pass over LlamaGen's transformer; `state` has visgen's names."""
    x = torch.cat([prefix, state["backbone.tok_embeddings.weight"][tokens]], dim=1)
    rows, slots, width = x.shape
    count, head = prefix.shape[1], width // heads
    visible = torch.ones(slots, slots, dtype=torch.bool).tril().repeat(rows, 1, 1)
    if present is not None:
        visible[:, :, :count] &= present[:, None, :]
        visible |= torch.eye(slots, dtype=torch.bool)
    cells = [(-1, -1)] * count + [divmod(i, grid[1]) for i in range(slots - count)]
    layer = 0
    while f"backbone.layers.{layer}.attention.wo.weight" in state:
        w = {k.split(f"layers.{layer}.")[1]: v for k, v in state.items() if f"layers.{layer}." in k}
        normed = rms_norm(x, w["attention_norm.weight"])
        packed = normed @ w["attention.wqkv.weight"].T
        q, k, v = packed.split([width, kv_heads * head, kv_heads * head], dim=-1)
        q, k, v = (t.reshape(rows, slots, -1, head).transpose(1, 2) for t in (q, k, v))
        q, k = (_rotated(t, cells) for t in (q, k))
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(head)).masked_fill(~visible.unsqueeze(1), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, slots, width)
        x = x + mixed @ w["attention.wo.weight"].T
        feed = (w[f"feed_forward.w{i}.weight"] for i in (1, 2, 3))
        x = x + swiglu(rms_norm(x, w["ffn_norm.weight"]), *feed)
        layer += 1
    x = rms_norm(x, state["backbone.norm.weight"])[:, count - 1 :]
    return x @ state["head.output.weight"].T


def _rotated(x: Tensor, cells: list[tuple[int, int]]) -> Tensor:
    """x [B, H, S, d], by the same angles as `rope_2d`, as complex tensors so that a whole model is affordable."""
    width = x.shape[-1]
    units = torch.tensor([rope_2d([1.0, 0.0] * (width // 2), *cell) for cell in cells])
    turn = torch.view_as_complex(units.unflatten(-1, (-1, 2)))  # [S, d / 2]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def model_law(model: Any, label: int, warp: Any, guidance: Any) -> Callable[[list[int]], list[float]]:
    """Probabilities of the next token of a class-conditional model, by full passes."""
    config = model.config.backbone
    table = model.condition.embedding_table.weight
    prefix = torch.stack([table[-1], table[label]]).unsqueeze(1)  # null, conditional

    @functools.cache
    def known(tokens: tuple[int, ...]) -> list[float]:
        past = torch.tensor([tokens, tokens], dtype=torch.int64).reshape(2, -1)
        null, given = ar_logits(
            model.state_dict(), prefix, past, model.grid[1:], config.heads, config.kv_heads or config.heads
        )[:, -1].tolist()
        s = guidance_scale(len(tokens), model.tokens, guidance.scale, guidance.interval, guidance.schedule)
        logits = [guided(u, c, s) for u, c in zip(null, given, strict=True)]
        return warped(logits, warp.temperature, warp.top_k, warp.top_p)

    return lambda tokens: known(tuple(tokens))


# ----------------------------------------------------------------------------------------------------- decoding


def guided(null: float, conditional: float, scale: float) -> float:
    return null + scale * (conditional - null)


def guidance_scale(
    k: int, tokens: int, scale: float, interval: tuple[float, float] = (0, 1), schedule: str = "constant"
) -> float:
    """The scale at token k of `tokens`."""
    at = k / (tokens - 1) if tokens > 1 else 0.0
    if not interval[0] <= at <= interval[1]:
        return 1.0
    grown = {"constant": 1.0, "linear": at, "cosine": 0.5 - 0.5 * math.cos(math.pi * at)}[schedule]
    return 1 + (scale - 1) * grown


def warped(logits: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """Probabilities after temperature, top-k (ties kept) and top-p, by plain sorting (LlamaGen 3.2)."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(len(logits))]
    scaled = [x / max(temperature, 1e-5) for x in logits]
    kept = set(range(len(scaled)))
    if 0 < top_k < len(scaled):
        least = sorted(scaled, reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= least}
    if top_p < 1:
        mass, survivors = softmax(scaled, kept), set()
        total = 0.0
        for i in sorted(kept, key=lambda i: (-scaled[i], i)):
            if total >= top_p:
                break
            survivors.add(i)
            total += mass[i]
        kept = survivors
    return softmax(scaled, kept)


def softmax(logits: Sequence[float], kept: set[int] | None = None) -> list[float]:
    kept = set(range(len(logits))) if kept is None else kept
    top = max(logits[i] for i in kept)
    mass = [math.exp(x - top) if i in kept else 0.0 for i, x in enumerate(logits)]
    return [m / sum(mass) for m in mass]


def ar_sample(
    law: Callable[[list[int]], list[float]],  # tokens so far -> probabilities of the next
    count: int,
    gumbel: Callable[[int, int], float],  # (position, token) -> noise
    known: Mapping[int, int] | None = None,
) -> list[int]:
    """Autoregression without a cache; token k is the argmax of log p + Gumbel."""
    tokens: list[int] = []
    for k in range(count):
        if known and k in known:
            tokens.append(known[k])
            continue
        tokens.append(gumbel_max(law(tokens), lambda i, k=k: gumbel(k, i)))
    return tokens


def gumbel_max(law: Sequence[float], noise: Callable[[int], float]) -> int:
    scores = [math.log(p) + noise(i) if p > 0 else -math.inf for i, p in enumerate(law)]
    return scores.index(max(scores))


def acceptance(law: Sequence[float], draft: int, drawn_from: Sequence[float]) -> float:
    """min(1, p / q) (Leviathan et al. 2023, section 2.3)."""
    return min(1.0, law[draft] / drawn_from[draft]) if drawn_from[draft] > 0 else 0.0


def residual(law: Sequence[float], drawn_from: Sequence[float]) -> list[float]:
    """norm(max(p - q, 0)) (same source)."""
    rest = [max(p - q, 0.0) for p, q in zip(law, drawn_from, strict=True)]
    return [r / sum(rest) for r in rest] if sum(rest) > 0 else list(law)


TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # streams of noise


def jacobi_sample(
    law: Callable[[list[int]], list[float]],
    count: int,
    window: int,
    drafting: str,
    init: str,
    columns: int,
    seed: int,
    known: Mapping[int, int] | None = None,
) -> tuple[list[int], list[int]]:
    """Speculative Jacobi decoding of one image: tokens, and the iteration that fixed each. See docs/methods.md."""
    known, vocab, iteration, done = known or {}, len(law([])), 0, 0

    def certain(token: int) -> list[float]:
        return [float(i == token) for i in range(vocab)]

    def draw(probs: list[float], k: int, stream: int) -> int:
        at = 0 if stream == TOKEN else iteration
        return gumbel_max(probs, lambda i: gumbel(seed, k, i, stream, at))

    own = TOKEN if "gumbel" in drafting else DRAFT
    tokens, rounds = [known.get(k, 0) for k in range(count)], [0] * count
    q = {k: certain(tokens[k]) for k in range(min(window, count))}
    newest: dict[int, list[float]] = {}
    while done < count:
        iteration, end = iteration + 1, max(q) + 1
        p = {k: certain(known[k]) if k in known else law(tokens[:k]) for k in range(done, end)}
        drawn, refused = {}, []
        for k in range(done, end):
            if drafting == "pure_gumbel":
                drawn[k] = draw(p[k], k, TOKEN)
                kept = drawn[k] == tokens[k]
            else:
                kept = uniform(seed, k, 0, ACCEPT, iteration) < acceptance(p[k], tokens[k], q[k])
                if refused and drafting != "coupled":
                    drawn[k] = draw(p[k], k, own)
                else:
                    drawn[k] = tokens[k] if kept else draw(residual(p[k], q[k]), k, RESIDUAL)
            refused += [] if kept else [k]
        for k, token in drawn.items():
            tokens[k], newest[k % columns] = token, p[k]
        last = refused[0] if refused else end - 1
        rounds[done : last + 1] = [iteration] * (last + 1 - done)
        q = {k: p[k] for k in range(last + 1, end)}
        for k in range(end, min(last + 1 + window, count)):
            even = [1 / vocab] * vocab
            q[k] = {"uniform": even, "repeat": certain(tokens[end - 1])}.get(init) or newest.get(k % columns, even)
            q[k] = certain(known[k]) if k in known else q[k]
        for k in range(end, min(last + 1 + window, count)):
            tokens[k] = draw(q[k], k, own)
        done = last + 1
    return tokens, rounds


def speculative_sample(
    law: Callable[[list[int]], list[float]],
    draft: Callable[[list[int]], list[float]],
    count: int,
    length: int,
    threshold: float,
    seed: int,
    prior: tuple[float, float],
) -> tuple[list[int], list[int]]:
    """Speculative sampling of one image with an adaptive draft length: tokens, and the iteration that fixed each."""
    vocab, iteration, done, tokens, rounds = len(law([])), 0, 0, [0] * count, [0] * count
    overlap, tested = prior[0] * prior[1], prior[1]

    def draw(probs: list[float], k: int, stream: int) -> int:
        return gumbel_max(probs, lambda i: gumbel(seed, k, i, stream, iteration))

    while done < count:
        iteration += 1
        wanted = max(1, sum(1 - (overlap / tested) ** n <= threshold for n in range(1, length + 1)))
        end, q = min(done + length + 1, count), {}
        for k in range(done, end):
            drafted = k < done + wanted
            q[k] = draft(tokens[:k]) if drafted else [1 / vocab] * vocab
            tokens[k] = draw(q[k], k, DRAFT)
        last = end - 1
        for k in range(done, end):
            p = law(tokens[:k])
            if k < done + wanted:
                overlap, tested = overlap + sum(map(min, p, q[k])), tested + 1
            if uniform(seed, k, 0, ACCEPT, iteration) >= acceptance(p, tokens[k], q[k]):
                tokens[k] = draw(residual(p, q[k]), k, RESIDUAL)
                last = k
                break
        rounds[done : last + 1] = [iteration] * (last + 1 - done)
        done = last + 1
    return tokens, rounds


# -------------------------------------------------------------------------------------------------------- noise

_M = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: int) -> int:
    """SplitMix64's finaliser on unsigned 64-bit integers (Steele, Lea, Flood 2014)."""
    x &= _M
    x = ((x ^ (x >> 30)) * _MIX_1) & _M
    x = ((x ^ (x >> 27)) * _MIX_2) & _M
    return x ^ (x >> 31)


def bits(seed: int, index: int, lane: int, stream: int, iteration: int = 0) -> int:
    """Signed 64-bit noise of lane 0, 1, ... at (seed, index, stream, iteration)."""
    key = mix(seed + _GOLDEN)
    key = mix(key + index * _GOLDEN)
    key = mix(key ^ (((stream + 1) * _MIX_1) & _M))
    key = mix(key + iteration * _MIX_2)
    out = mix(key + (lane + 1) * _GOLDEN)
    return out - (1 << 64) if out >> 63 else out


def uniform(seed: int, index: int, lane: int, stream: int, iteration: int = 0) -> float:
    high = (bits(seed, index, lane, stream, iteration) & _M) >> 24
    return min((high + 0.5) / 2**40, 1 - 2**-24)


def gumbel(seed: int, index: int, lane: int, stream: int, iteration: int = 0) -> float:
    return -math.log(-math.log1p(-uniform(seed, index, lane, stream, iteration)))


# ---------------------------------------------------------------------------------- a diffusion transformer (DiT)


def rope_axes(
    vector: Sequence[float], place: Sequence[int], split: Sequence[int], bases: Sequence[float]
) -> list[float]:
    """One head's vector of d numbers at `place`: the pairs (2i, 2i+1) of each axis' part turn with its coordinate."""
    out: list[float] = []
    start = 0
    for at, size, base in zip(place, split, bases, strict=True):
        for i in range(size // 2):
            a, b = vector[start + 2 * i : start + 2 * i + 2]
            turned = complex(a, b) * cmath.exp(1j * at * base ** (-2 * i / size))
            out += [turned.real, turned.imag]
        start += size
    return out


def dit(
    weights: Mapping[str, Tensor],
    tokens: Tensor,  # [N, C] of one image
    places: Sequence[Sequence[int]],  # (y, x) or (t, y, x) of every token
    time: float,
    label: Tensor,  # [D]
    heads: int,
    split: Sequence[int],
    bases: Sequence[float],
    eps: float = 1e-6,
) -> Tensor:
    """Plain DiT (arXiv 2212.09748) with adaLN-Zero, qk-norm and axial rotation; all tokens see all others: [N, D]."""

    def linear(x: Tensor, name: str) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def modulated(x: Tensor, norm: str, shift: Tensor, scale: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{norm}.weight"], eps) * (1 + scale) + shift

    angles = [time * 10000 ** (-k / 128) for k in range(128)]
    wave = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=tokens.dtype)
    about = silu(linear(silu(linear(wave, "time.0")), "time.2") + label)
    x = linear(tokens, "embed")
    count, width = x.shape
    head_dim = width // heads
    layers = 1 + max(int(k.split(".")[1]) for k in weights if k.startswith("layers."))
    for layer in range(layers):
        name = f"layers.{layer}"
        shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = linear(about, f"{name}.modulation").split(width)
        qkv = linear(modulated(x, f"{name}.attention_norm", shift, scale), f"{name}.attention.qkv")
        mixed = torch.zeros_like(x)
        for h in range(heads):
            part = slice(h * head_dim, (h + 1) * head_dim)
            q, k, v = (qkv[:, j * width : (j + 1) * width][:, part] for j in range(3))
            q = rms_norm(q, weights[f"{name}.attention.query_norm.weight"], eps)
            k = rms_norm(k, weights[f"{name}.attention.key_norm.weight"], eps)
            q, k = (
                torch.tensor([rope_axes(y[n].tolist(), places[n], split, bases) for n in range(count)], dtype=x.dtype)
                for y in (q, k)
            )
            mixed[:, part] = (q @ k.T / math.sqrt(head_dim)).softmax(-1) @ v
        x = x + gate * linear(mixed, f"{name}.attention.out")
        inner = linear(modulated(x, f"{name}.ffn_norm", shift_ffn, scale_ffn), f"{name}.ffn.0")
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))
        x = x + gate_ffn * linear(0.5 * inner * (1 + tanh), f"{name}.ffn.2")
    shift, scale = linear(about, "modulation").split(width)
    return modulated(x, "norm", shift, scale)


# ------------------------------------------------------------------------- the law of a token as a mixture of codes


def mixture_log_density(x: Tensor, t: float, p: Sequence[float], codes: Tensor) -> Tensor:
    """log of sum_k p_k N(x; (1 - t) c_k, t^2 I), one token [C], code by code; codes with p_k = 0 are left out."""
    terms = [math.log(p[k]) - (x - (1 - t) * codes[k]).square().sum() / (2 * t * t) for k in range(len(p)) if p[k] > 0]
    return torch.stack(terms).logsumexp(0) - len(x) * (math.log(t) + 0.5 * math.log(2 * math.pi))


def mixture_posterior(x: Tensor, t: float, p: Sequence[float], codes: Tensor) -> list[float]:
    """P(code k | x) for every k, by Bayes' rule."""
    logs = [-float((x - (1 - t) * codes[k]).square().sum()) / (2 * t * t) for k in range(len(p))]
    top = max(log for log, mass in zip(logs, p, strict=True) if mass > 0)
    joint = [mass * math.exp(log - top) if mass > 0 else 0.0 for log, mass in zip(logs, p, strict=True)]
    return [value / sum(joint) for value in joint]


def mixture_mean(x: Tensor, t: float, p: Sequence[float], codes: Tensor) -> Tensor:
    return sum(w * c for w, c in zip(mixture_posterior(x, t, p, codes), codes, strict=True))  # type: ignore[return-value]


def flow_euler(x: Tensor, p: Sequence[float], codes: Tensor, steps: int, stop: float) -> tuple[int, Tensor]:
    """Noise [C] -> token by Euler's method on dx/dt = (x - mean) / t from t = 1 to `stop`: another solver than the
    one it checks. Also the end point."""
    times = [1 - (1 - stop) * i / steps for i in range(steps + 1)]
    for t, s in itertools.pairwise(times):
        x = x + (s - t) * (x - mixture_mean(x, t, p, codes)) / t
    weights = mixture_posterior(x, stop, p, codes)
    return weights.index(max(weights)), x


def flow_multistep(noise: Tensor, p: Sequence[float], codes: Tensor, steps: int) -> int:
    """Noise [C] -> token by DPM-Solver++ 2M (arXiv 2211.01095, algorithm 2), written with its own lambda and h."""
    lam = [
        math.log((steps * t) / (steps - steps * t)) if 0 < t < 1 else None for t in (i / steps for i in range(steps))
    ]
    x, means = noise, []
    for i in range(steps - 1):
        t, s = 1 - i / steps, 1 - (i + 1) / steps
        means.append(mixture_mean(x, t, p, codes))
        d = means[-1]
        if i >= 2:
            h, h_last = lam[i + 1] - lam[i], lam[i] - lam[i - 1]  # type: ignore[operator]
            r = h_last / h
            d = (1 + 1 / (2 * r)) * means[-1] - 1 / (2 * r) * means[-2]
        x = s / t * x + (1 - s) * d - (s / t) * (1 - t) * d
    weights = mixture_posterior(x, 1 / steps, p, codes)
    return weights.index(max(weights))
