"""Kimi delta attention: the gate, the recurrence over one token or a segment, its chunked form, and the output.

All forms compute in float64 and return the unrounded output and a float64 state. The published model keeps the
state in float32; here the engine has to keep it in float64. Rounding to float32 happens at other tokens when a prompt
is prefilled in chunks than when it is decoded, and that changes about one BF16 output in 30,000. In float64 the forms
differ by about 1e-15, and agree bit for bit once `kda_output` has rounded.
"""

import torch

from workloads.kernels.linear import round_to_bf16
from workloads.kernels.norm import l2_normalise, rms_scale

_DECAY_BYTES = 4 << 20  # decays between the tokens of chunks that are computed at once


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
    chunk: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A segment of one request, `chunk` tokens at a time; shapes and result as in `kda_recurrent`.

    The number of exponentials grows with `chunk`, that of steps in sequence falls with it. The last chunk is filled
    up with tokens that decay nothing and write nothing.
    """
    if chunk < 1:
        raise ValueError(f"The chunk is {chunk} tokens; it must be at least 1.")
    heads, tokens, dk = k.shape
    padding = (0, 0, 0, -tokens % chunk)
    q, k, v, g, beta = (
        torch.nn.functional.pad(x, padding[4 - 2 * (x.dim() - 1) :]) for x in (q, k, v, g, beta)
    )
    q, k, v, g, beta, state = _widen(q, k, v, g, beta, state)
    out = torch.empty_like(v)
    at_once = chunk * max(1, _DECAY_BYTES // (8 * heads * chunk * chunk * dk))
    for start in range(0, tokens, at_once):
        part = slice(start, start + at_once)
        cut = [x[:, part].reshape(heads, -1, chunk, *x.shape[2:]) for x in (q, k, v, g, beta)]
        mixed, state = _chunks(cut[0], cut[1], cut[2], cut[3], cut[4], state)
        out[:, part] = mixed
    return out[:, :tokens], state


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


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over n chunks of C tokens: q, k, g [H,n,C,dk], v [H,n,C,dv], beta [H,n,C], state [H,dk,dv].

    With G the running sum of g within a chunk, token j reaches token i >= j through exp(G_i - G_j) per key channel.
    The corrections v' of a chunk that state S enters solve the unit lower triangular system
    v'_i + beta_i sum_{j<i} (k_i exp(G_i - G_j)) . k_j v'_j = beta_i (v_i - (k_i exp G_i) S).
    It is solved for all chunks at once, as v' = u - w S; then the state that leaves a chunk is linear in the one
    that enters it, which leaves a single product per chunk to be taken in sequence.
    """
    total = g.cumsum(dim=2)
    keys, queries = _decayed_scores(q, k, total)
    from_start = total.exp()
    targets = beta.unsqueeze(-1) * torch.cat([v, k * from_start], dim=-1)
    system = beta.unsqueeze(-1) * keys.tril(-1)
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    leaving = (k * (total[:, :, -1:] - total).exp()).transpose(2, 3)
    transition = from_start[:, :, -1].diag_embed() - leaving @ w
    added = leaving @ u
    states = [state]
    for n in range(k.shape[1]):
        states.append(torch.baddbmm(added[:, n], transition[:, n], states[-1]))
    entering = torch.stack(states[:-1], dim=1)
    out = (q * from_start) @ entering + queries.tril() @ (u - w @ entering)
    return out.flatten(1, 2), states[-1]


def _decayed_scores(
    q: torch.Tensor, k: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_d x_id exp(G_id - G_jd) k_jd for x = k and x = q, each [...,C,C]; meaningful for j <= i.

    The difference is taken before the exponential: exp(G_i) * exp(-G_j) would overflow once |G| exceeds 709,
    and is 0 * inf soon after. For j <= i the difference is never positive; the clamp keeps the unused half finite.
    """
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp_(max=0).exp_()
    between *= k.unsqueeze(-3)
    scores = between @ torch.stack([k, q], dim=-1)
    return scores[..., 0], scores[..., 1]
