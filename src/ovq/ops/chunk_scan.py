"""What chunks of tokens leave to one another: the sequential part of every recurrence in chunks.

As one operator of PyTorch it has no loop that ``torch.compile`` would unroll, and trace anew for
each number of chunks. Its gradient is the same recurrence the other way.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def scan_chunks(
    whole: Float[Tensor, "M *L"], added: Float[Tensor, "M *L K V"], h: Float[Tensor, "*L K V"]
) -> tuple[Float[Tensor, "M *L K V"], Float[Tensor, "*L K V"]]:
    """The memories of ``h_(m + 1) = w_m h_m + a_m``, one chunk after another.

    Args:
        whole: ``w``, the decay of a whole chunk.
        added: ``a``, what its tokens leave.
        h: the memory before the first chunk.

    Returns:
        The memory before each chunk, and the one after the last.

    Example:
        >>> halves, ones = torch.full((3,), 0.5), torch.ones(3, 1, 1)
        >>> before, last = scan_chunks(halves, ones, torch.full((1, 1), 8.0))
        >>> before.flatten().tolist(), last.item()
        ([8.0, 5.0, 3.5], 2.75)
    """
    before, last, _ = _scan(whole[..., None, None], added, h, None, None, None, False)
    return before, last


def scan_corrected_chunks(
    whole: Float[Tensor, "M *L"],
    keys: Float[Tensor, "M *L K C"],
    written: Float[Tensor, "M *L C V"],
    recalled: Float[Tensor, "M *L C K"],
    h: Float[Tensor, "*L K V"],
) -> tuple[Float[Tensor, "M *L K V"], Float[Tensor, "M *L C V"], Float[Tensor, "*L K V"]]:
    """The same where what tokens write depends on the memory they find.

    ``u_m = U_m + R_m h_m; h_(m + 1) = w_m h_m + K_m u_m``.

    Args:
        whole: ``w``, the decay of a whole chunk.
        keys: ``K``, of its ``C`` tokens, each decayed to the end of the chunk.
        written: ``U``, what the tokens would write into an empty memory.
        recalled: ``R``, what they write less for each number in it.
        h: the memory before the first chunk.

    Returns:
        The memory before each chunk, what its tokens write, ``u``, and the memory after the last.
    """
    nothing = h.new_zeros(()).expand(len(whole), *h.shape)
    before, last, u = _scan(whole[..., None, None], nothing, h, keys, written, recalled, False)
    return before, u, last


@torch.library.custom_op("ovq::chunk_scan", mutates_args=())
def _scan(
    whole: Tensor, added: Tensor, h: Tensor,
    keys: Tensor | None, written: Tensor | None, recalled: Tensor | None, from_the_end: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``u_m = U_m + R_m h; h <- w_m h + a_m + K_m u_m``: ``h`` before each, the last ``h``, ``u``.

    ``K``, ``U`` and ``R`` are all there or none is. ``from_the_end``: the last chunk comes first.
    """
    before, last, u = _outputs(whole, added, h, keys, written, recalled, from_the_end)
    lanes = h.shape[:-2].numel()

    def in_lanes(x: Tensor) -> Tensor:
        return x.reshape(len(x), lanes, *x.shape[-2:])

    w, a = in_lanes(whole), in_lanes(added)
    places = [*in_lanes(before), *in_lanes(last[None])]
    if from_the_end:
        places = [*places[-2::-1], places[-1]]
    places[0].copy_(in_lanes(h[None])[0])
    order = reversed(range(len(added))) if from_the_end else range(len(added))
    for m, h, after in zip(order, places, places[1:], strict=False):
        torch.addcmul(a[m], w[m], h, out=after)
        if keys is not None and written is not None and recalled is not None:
            K, U, R, wrote = (in_lanes(x[m : m + 1])[0] for x in (keys, written, recalled, u))
            after.baddbmm_(K, torch.baddbmm(U, R, h, out=wrote))
    return before, last, u


@_scan.register_fake
def _outputs(
    whole: Tensor, added: Tensor, h: Tensor,
    keys: Tensor | None, written: Tensor | None, recalled: Tensor | None, from_the_end: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    u = added.new_empty(0 if written is None else written.shape)
    return added.new_empty(added.shape), added.new_empty(h.shape), u


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    whole, _, _, keys, _, recalled, ctx.from_the_end = inputs
    before, _, u = output
    ctx.save_for_backward(whole, keys, recalled, before, u)


def _backward(ctx: Any, of_before: Tensor, of_last: Tensor, of_u: Tensor) -> tuple[Any, ...]:
    """What reaches a memory goes on to the one before it, and to what was written on the way."""
    whole, keys, recalled, before, u = ctx.saved_tensors
    corrects, forward = keys is not None, not ctx.from_the_end
    low_rank = (recalled.mT, of_u, keys.mT) if corrects else (None, None, None)
    of_after, of_h, of_u = _scan(whole, of_before, of_last, *low_rank, forward)
    of_whole = (of_after * before).sum((-2, -1), keepdim=True)
    if not corrects:
        return of_whole, of_after, of_h, None, None, None, None
    return of_whole, of_after, of_h, of_after @ u.mT, of_u, of_u @ before.mT, None


_scan.register_autograd(_backward, setup_context=_keep)
