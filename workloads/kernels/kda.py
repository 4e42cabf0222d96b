"""Kimi delta attention: the gate, the recurrence over one token or a segment, its chunked form, and the output.

All forms compute in float64 and return the unrounded output and a float64 state. The published model keeps the
state in float32; here the engine has to keep it in float64. Rounding to float32 happens at other tokens when a prompt
is prefilled in chunks than when it is decoded, and that changes about one BF16 output in 30,000. In float64 the forms
differ by about 1e-15, and agree bit for bit once `kda_output` has rounded.
"""

import torch

from workloads.kernels.linear import round_to_bf16
from workloads.kernels.norm import l2_normalise, rms_scale


def kda_gate(
    f_out: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float
) -> torch.Tensor:
    """Log-space decay of every key channel, in (lower_bound, 0): lower_bound * sigmoid(exp(A_log) * (f + dt_bias)).

    f_out: BF16 [T,H,dk], output of f_b(f_a(x)). a_log: float32, its first H entries belong to these heads.
    dt_bias: float32 [H*dk] or [H,dk]. Returns float64 [T,H,dk].
    """
    heads, channels = f_out.shape[-2:]
    if a_log.shape[0] < heads:
        raise ValueError(
            f"A_log has {a_log.shape[0]} entries and the gate {heads} heads; pass the entries of these heads."
        )
    slope = a_log[:heads].to(torch.float64).exp().unsqueeze(-1)
    shifted = f_out.to(torch.float64) + dt_bias.to(torch.float64).view(heads, channels)
    return lower_bound * torch.sigmoid(slope * shifted)


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of B requests.

    q, k: [B,H,dk] and v: [B,H,dv], BF16 after convolution and SiLU; q and k are L2-normalised here and q is
    scaled by dk^-1/2. g: [B,H,dk] from `kda_gate`. beta: [B,H], after its sigmoid. state: [B,H,dk,dv].
    S' = Diag(exp g) S; S'' = S' + beta k (v - S'^T k)^T; o = S''^T q.
    Returns o float64 [B,H,dv] and the new states float64 [B,H,dk,dv]; the inputs are not written to.
    """
    return _step(*_widen(q, k, v, g, beta, state))


def kda_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A segment of one request, token by token: the reference for `kda_chunked`.

    Head-major: q, k, g [H,T,dk], v [H,T,dv], beta [H,T], state [H,dk,dv]; dtypes and meaning as in `kda_decode`.
    Returns o float64 [H,T,dv] and the state after the segment, float64 [H,dk,dv].
    """
    q, k, v, g, beta, state = _widen(q, k, v, g, beta, state)
    out = torch.empty_like(v)
    for t in range(v.shape[1]):
        out[:, t], state = _step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
    return out, state


def kda_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A segment of one request, `chunk` tokens at a time; shapes and result as in `kda_recurrent`.

    Needs 8 * H * chunk^2 * dk bytes for the decays between the tokens of one chunk.
    """
    if chunk < 1:
        raise ValueError(f"The chunk is {chunk} tokens; it must be at least 1.")
    q, k, v, g, beta, state = _widen(q, k, v, g, beta, state)
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], chunk):
        part = slice(start, start + chunk)
        out[:, part], state = _chunk(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], state)
    return out, state


def kda_output(o: torch.Tensor, norm_weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over each head times sigmoid(gate).

    o: [T,H,dv] from one of the forms above, rounded to BF16 first, where their GPU kernels store it.
    norm_weight: float32 or BF16 [dv], shared by the heads. gate: BF16 [T,H,dv]. Returns BF16 [T,H,dv].
    """
    stored = round_to_bf16(o).to(torch.float64)
    normed = stored * rms_scale(stored, eps) * norm_weight.to(torch.float64)
    return round_to_bf16(normed * torch.sigmoid(gate.to(torch.float64)))


_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _widen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> _Operands:
    """All operands in float64, q and k normalised and q scaled."""
    scaled = l2_normalise(q) * q.shape[-1] ** -0.5
    wide = torch.float64
    return scaled, l2_normalise(k), v.to(wide), g.to(wide), beta.to(wide), state.to(wide)


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence for one token; any leading dimensions."""
    decayed = g.exp().unsqueeze(-1) * state
    error = v - (k.unsqueeze(-2) @ decayed).squeeze(-2)
    state = decayed + (beta.unsqueeze(-1) * k).unsqueeze(-1) * error.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over the C tokens of one chunk, all heads at once.

    With G the running sum of g, token j reaches token i >= j through exp(G_i - G_j) per key channel. The
    corrections v' solve the unit lower triangular system
    v'_i + beta_i sum_{j<i} (k_i exp(G_i - G_j)) . k_j v'_j = beta_i (v_i - (k_i exp G_i) S).
    """
    total = g.cumsum(dim=1)
    keys, queries = _decayed_scores(q, k, total)
    from_start = total.exp()
    target = beta.unsqueeze(-1) * (v - (k * from_start) @ state)
    system = beta.unsqueeze(-1) * keys.tril(-1)
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = (q * from_start) @ state + queries.tril() @ corrections
    to_end = (total[:, -1:] - total).exp()
    state = from_start[:, -1].unsqueeze(-1) * state + (k * to_end).transpose(1, 2) @ corrections
    return out, state


def _decayed_scores(
    q: torch.Tensor, k: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_d x_id exp(G_id - G_jd) k_jd for x = k and x = q, each [H,C,C], for j <= i.

    The difference is taken before the exponential, where it is never positive: the factors of
    exp(G_i) * exp(-G_j) overflow and vanish once |G| exceeds 709. Entries j > i may be infinite or NaN; the
    caller selects the lower triangle.
    """
    between = (total.unsqueeze(2) - total.unsqueeze(1)).exp_()
    between *= k.unsqueeze(1)
    scores = between @ torch.stack([k, q], dim=-1)
    return scores[..., 0], scores[..., 1]
