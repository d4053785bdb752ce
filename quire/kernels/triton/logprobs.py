"""Log probabilities of sampled tokens and of the most likely ones, on the device.

Two launches: the blocks of each row (largest logit, sum of exponentials, how many logits exceed that of the token, and the best
few tokens), then the rows. Equal logits are ordered by token id, since a key of 64 bits has both.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.triton.launching import Launch, check_contiguous, check_tensor
from quire.kernels.triton.logprobs_kernels import LOGPROB_WIDTH, MAX_TOP, gather_logprobs, scan_logprobs
from quire.kernels.triton.sizes import power_of_two

_BLOCK = 2048


def logprob_launches(out: Tensor, logits: Tensor, token_ids: Tensor, num_tops: Tensor) -> list[Launch]:
    """Return the launches that write the log probabilities of rows: log_softmax in f32, see sampling/logprobs.py.

    out        [R, LOGPROB_WIDTH] i32, of which f32 numbers have the bits
    logits     [R, V] float, with contiguous rows
    token_ids  [R] i64; of a negative one no more is asked for than the best tokens
    num_tops   [R] i32: how many of the best tokens are listed, up to MAX_TOP and V; -1: the row asks for nothing
    """
    num_rows, vocab_size = logits.shape
    check_tensor("logits", logits, (None, None), torch.float32, torch.bfloat16, torch.float16)
    check_contiguous("out", out, (num_rows, LOGPROB_WIDTH), torch.int32)
    check_contiguous("token_ids", token_ids, (num_rows,), torch.int64)
    check_contiguous("num_tops", num_tops, (num_rows,), torch.int32)
    num_blocks = triton.cdiv(vocab_size, _BLOCK)

    def per_block(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, num_blocks, *shape, dtype=dtype, device=logits.device)

    arguments = {
        "logits_ptr": logits,
        "ids_ptr": token_ids,
        "num_tops_ptr": num_tops,
        "peaks_ptr": per_block(torch.float32),
        "sums_ptr": per_block(torch.float32),
        "larger_ptr": per_block(torch.int32),
        "keys_ptr": per_block(torch.int64, MAX_TOP),
        "logits_stride": logits.stride(0),
        "num_blocks": num_blocks,
    }
    scan = Launch(scan_logprobs, (num_rows, num_blocks), {**arguments, "vocab_size": vocab_size}, {"BLOCK": _BLOCK}, 4, 1)
    constants = {"BLOCKS": power_of_two(num_blocks)}
    return [scan, Launch(gather_logprobs, (num_rows,), {**arguments, "out_ptr": out}, constants, 8, 1)]
