"""Pack known codes as the formats store them, in plain numpy and independent of quire's unpacking."""

import numpy as np
import torch


def stream(codes, bits):
    """Pack [R, N] codes into a stream of bits per row, lowest first, as int32 words [R, W]."""
    codes = np.asarray(codes, np.int64)
    rows, count = codes.shape
    flags = ((codes[:, :, None] >> np.arange(bits)) & 1).reshape(rows, count * bits).astype(np.uint8)
    flags = np.pad(flags, ((0, 0), (0, -count * bits % 32)))
    return torch.from_numpy(np.ascontiguousarray(np.packbits(flags, axis=1, bitorder="little")).view(np.int32).copy())


def gptq(codes, zeros, scales, bits, is_v2, groups=None):
    """Store W[o, k] = scales[o, g] * (codes[o, k] - zeros[o, g]); arrays are [O, K] and [O, G]."""
    packed = stream(zeros.T, bits)
    if not is_v2 and bits == 3:
        packed = stream((zeros.T - 1) & 7, bits)
    elif not is_v2:
        ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        packed = torch.from_numpy((packed.numpy().view(np.uint32) - ones).view(np.int32))
    parts = {
        "qweight": stream(codes, bits).t().contiguous(),
        "qzeros": packed,
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return parts if groups is None else {**parts, "g_idx": torch.from_numpy(np.asarray(groups, np.int32))}


def awq(codes, zeros, scales):
    """Store AWQ's "gemm" layout; arrays are [O, K] and [O, G]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleave(matrix):
        slots = matrix.T.reshape(matrix.shape[1], -1, 8)[:, :, order]
        return stream(slots.reshape(matrix.shape[1], -1), 4)

    return {"qweight": interleave(codes), "qzeros": interleave(zeros), "scales": torch.from_numpy(scales.T.copy())}


def packed(codes, scales, bits, zeros=None):
    """Store compressed-tensors' pack-quantized; codes and zeros are unsigned, arrays [O, K] and [O, G]."""
    parts = {
        "weight_packed": stream(codes, bits),
        "weight_scale": torch.from_numpy(scales.copy()),
        "weight_shape": torch.tensor(codes.shape),
    }
    return parts if zeros is None else {**parts, "weight_zero_point": stream(zeros.T, bits).t().contiguous()}


def halves(values):
    """Pack codes of 4 bits into bytes, the first of a pair in the high half."""
    values = np.append(values.reshape(-1), np.zeros(values.size % 2, values.dtype)).reshape(-1, 2)
    return torch.from_numpy((values[:, 0] << 4 | values[:, 1]).astype(np.uint8))


def affine(codes, zeros, scales, groups):
    """Return scales[o, g] * (codes[o, k] - zeros[o, g]) with g = groups[k], in f32."""
    difference = codes.astype(np.float32) - zeros.astype(np.float32)[:, groups]
    return torch.from_numpy(scales.astype(np.float32)[:, groups] * difference)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(codes, powers):
    """Store W[..., k] = E2M1[codes[..., k]] * 2 ** (powers[..., k // 32] - 127) as gpt-oss does; return both and W."""
    codes = np.asarray(codes).reshape(*np.shape(powers), 32)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    numbers = E2M1[codes] * np.ldexp(np.float32(1), np.asarray(powers) - 127)[..., None].astype(np.float32)
    scales = torch.from_numpy(np.asarray(powers).astype(np.uint8))
    return torch.from_numpy(blocks), scales, torch.from_numpy(numbers.reshape(*numbers.shape[:-2], -1))
