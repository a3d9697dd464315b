"""torch's int4 operators of CUDA, slowly, nibble by nibble: as int4mm.cu in torch's source has them."""

import torch

aten = torch.ops.aten


def lanes(steps, words):
    """The place of each nibble: (step, lane, word, shift), and the (row in its tile, input) that it has there."""
    for step in range(steps):
        for lane in range(32):
            for word in range(words):
                first = (step * 2 * words + 2 * word) * 16 + 2 * (lane % 4)
                inputs = [first + extra for extra in (0, 8, 16, 24, 1, 9, 17, 25)]
                for position, column in enumerate(inputs):
                    yield (step, lane, word, 4 * position), (lane // 4, column)


def convert(pairs, inner):
    """Bytes (out, n/2), the first nibble of each in its high half → int32 (out/8, n/(16·inner), 32, inner/2)."""
    out, steps, words = len(pairs), pairs.shape[1] * 2 // (16 * inner), inner // 2
    nibbles = torch.stack([pairs >> 4, pairs & 15], -1).flatten(1).long()
    packed = torch.zeros(out // 8, steps, 32, words, dtype=torch.long)
    for (step, lane, word, shift), (row, column) in lanes(steps, words):
        packed[:, step, lane, word] |= nibbles[row::8, column] << shift
    return packed.to(torch.int32)  # the highest bit becomes the sign


def multiply(x, packed, group, terms):
    """(tokens, n) → (tokens, out): the matrix of (nibble − 8)·scale + centre, rounded to bfloat16."""
    tiles, steps, _, words = packed.shape
    values = torch.zeros(8 * tiles, steps * 32 * words)
    for (step, lane, word, shift), (row, column) in lanes(steps, words):
        values[row::8, column] = (packed[:, step, lane, word] >> shift & 15).float()
    scale, centre = (terms[..., k].float().T.repeat_interleave(group, 1) for k in (0, 1))
    matrix = ((values - 8) * scale + centre).bfloat16()
    return (x.float() @ matrix.float().T).bfloat16()


OPERATORS = {aten._convert_weight_to_int4pack.default: convert, aten._weight_int4pack_mm.default: multiply}
